"""Chat in a terminal; what the drafter guessed right is coloured.

    python examples/chat.py
    python examples/chat.py --once "What is 12 times 6?"

An empty line ends it.
"""

import argparse

from rich.console import Console

from dspark_hf.demo import print_legend
from dspark_hf.loading import Pair, load_pair
from dspark_hf.terminal import ColouredTextStreamer


def answer(pair: Pair, messages: list[dict[str, str]], max_new_tokens: int, console: Console) -> str:
    """Stream the answer to a conversation, and say what it took."""
    inputs = pair.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    out = pair.target.generate(
        **inputs.to(pair.target.device),
        assistant_model=pair.drafter,
        streamer=ColouredTextStreamer(pair.tokenizer, console),
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
    )
    stats = out.speculative_stats
    console.print(f"{stats.accepted} of {stats.verified} drafts accepted in {stats.rounds} rounds", style="dim")
    return pair.tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """One answer, or a conversation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo", help="folder or Hub id; default: the demo's target")
    parser.add_argument("--drafter", help="folder or Hub id of a drafter for it; default: the demo's")
    parser.add_argument("--once", metavar="TEXT", help="answer this and end")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    args = parser.parse_args()

    console = Console()
    pair = load_pair(args.target, args.drafter)
    print_legend(console)
    messages: list[dict[str, str]] = []
    while text := args.once or console.input("> "):
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": answer(pair, messages, args.max_new_tokens, console)})
        if args.once:
            break


if __name__ == "__main__":
    main()
