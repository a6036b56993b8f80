"""Several questions in one call: left-padded as for any batched generate, with statistics for each row.

    python examples/batch.py
    python examples/batch.py --target MODEL --drafter DRAFTER "First question" "Second question"

Rows do not wait for each other: each is drafted and committed at its own pace.
"""

import argparse

from dspark_hf.loading import load_pair


QUESTIONS = (
    "What is 12 times 6?",
    "A baker makes 72 rolls and sells 50. How many are left?",
    "Ann is 7 and Ben is twice as old. How old will Ben be in three years?",
)


def main() -> None:
    """Answer them all, and say of each what its drafts were worth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--target", default="demo", help="folder or Hub id; default: the demo's target")
    parser.add_argument("--drafter", help="folder or Hub id of a drafter for it; default: the demo's")
    parser.add_argument("--max-new-tokens", type=int, default=80)
    args = parser.parse_args()

    pair = load_pair(args.target, args.drafter)
    pair.tokenizer.padding_side = "left"
    inputs = pair.tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in args.questions],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    out = pair.target.generate(
        **inputs.to(pair.target.device),
        assistant_model=pair.drafter,
        max_new_tokens=args.max_new_tokens,
        return_dict_in_generate=True,
    )
    answers = pair.tokenizer.batch_decode(out.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for question, answer, row in zip(args.questions, answers, out.speculative_stats.rows, strict=True):
        print(f"> {question}\n{answer.strip()}")
        print(f"[{row.rounds} rounds, {row.accepted} of {row.verified} drafts accepted]\n")
    print(f"all rows: {out.speculative_stats.mean_acceptance_length:.2f} tokens a round")


if __name__ == "__main__":
    main()
