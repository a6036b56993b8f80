"""Generate with a target and its drafter, then look at what speculation did.

    python examples/generate.py
    python examples/generate.py --target MODEL --drafter DRAFTER

`load_pair` stands for AutoModelForCausalLM, AutoTokenizer and DSparkDraftModel, each with `from_pretrained`.
"""

import argparse

from dspark_hf.loading import load_pair


def main() -> None:
    """Draw three answers to one question in a batch; the drafter drafts for all rows at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo", help="folder or Hub id; default: the demo's target")
    parser.add_argument("--drafter", help="folder or Hub id of a drafter for it; default: the demo's")
    parser.add_argument("--max-new-tokens", type=int, default=80)
    args = parser.parse_args()

    pair = load_pair(args.target, args.drafter)
    target, drafter, tokenizer = pair.target, pair.drafter, pair.tokenizer
    messages = [{"role": "user", "content": "A baker makes 72 rolls and sells 50. How many are left?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = target.generate(
        **inputs.to(target.device),
        assistant_model=drafter,
        do_sample=True,
        temperature=0.2,
        top_p=0.9,
        num_return_sequences=3,
        max_new_tokens=args.max_new_tokens,
        return_dict_in_generate=True,
    )
    for answer in tokenizer.batch_decode(out.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True):
        print("-", answer.strip())
    print(f"tokens a round: {out.speculative_stats.mean_acceptance_length:.2f}")


if __name__ == "__main__":
    main()
