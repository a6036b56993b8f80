"""Generate with a target and its drafter, then look at what speculation did: `python examples/generate.py`."""

import torch

from dspark_hf import DSparkDraftModel
from dspark_hf.demo_target import demo_drafter_folder, load_demo_target


def main() -> None:
    """Draw three answers to one question in a batch; the drafter drafts for all rows at once."""
    target, tokenizer = load_demo_target()
    drafter = DSparkDraftModel.from_pretrained(demo_drafter_folder(), dtype=torch.bfloat16)
    messages = [{"role": "user", "content": "A baker makes 72 rolls and sells 50. How many are left?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = target.generate(
        **inputs,
        assistant_model=drafter,
        do_sample=True,
        temperature=0.2,
        top_p=0.9,
        num_return_sequences=3,
        max_new_tokens=80,
        return_dict_in_generate=True,
    )
    for answer in tokenizer.batch_decode(out.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True):
        print("-", answer.strip())
    print(f"tokens a round: {out.speculative_stats.mean_acceptance_length:.2f}")


if __name__ == "__main__":
    main()
