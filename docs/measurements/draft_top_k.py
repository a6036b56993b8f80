"""
What `draft_top_k` saves of a block, and how many draft tokens stay the same: the demo pair, blocks of real contexts,
neighbouring calls, medians of ratios.

    python docs/measurements/draft_top_k.py --threads 1 --pairs 80
"""

import argparse
import statistics
import time

import torch

from dspark_hf import sampling
from dspark_hf.command_files import read_prompts
from dspark_hf.loading import load_pair
from dspark_hf.modeling.draft_context import DraftContext
from dspark_hf.modeling.modeling_dspark import tokens_at


def most_likely(slot, logits, ids):
    """What greedy decoding does with a slot's logits."""
    return tokens_at(ids, sampling.most_likely(logits))


def drawn(slot, logits, ids):
    """What sampling at temperature 1 does with them."""
    return tokens_at(ids, sampling.draw_tokens(sampling.probabilities(logits)))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--top-k", type=int, nargs="+", default=[64, 256, 1024])
    args = parser.parse_args()
    pair = load_pair(dtype=args.dtype, threads=args.threads)
    drafter, target = pair.drafter, pair.target
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    made = []  # contexts and anchors
    for prompt in next(iter(read_prompts(None, 6).values())):
        inputs = pair.encode(prompt)
        text = target.generate(**inputs, max_new_tokens=48, do_sample=False)
        states = target(text, output_hidden_states=True).hidden_states
        taps = torch.cat([states[tap + 1][0] for tap in drafter.config.target_layer_ids], dim=-1)
        made += [(taps[:end], text[:, end]) for end in range(inputs["input_ids"].shape[1], text.shape[1] - 8, 8)]

    def block(turn, select, top_k):
        """Seconds and tokens of a block as decoding drafts it: two new positions behind a context that is there."""
        taps, anchors = made[turn % len(made)]
        context = DraftContext(drafter.config, [0], capacity=512)
        slots = drafter.block_tokens(anchors)
        drafter(drafter.embed(slots, embedding), taps[:-2], [len(taps) - 2], context)
        start = time.perf_counter()
        hidden = drafter(drafter.embed(slots, embedding), taps[-2:], [2], context)
        tokens = drafter.draft(hidden, anchors, head, select, top_k=top_k).tokens
        return time.perf_counter() - start, tokens

    for select in (most_likely, drawn):
        for top_k in args.top_k:
            times, same = ([], []), []
            for turn in range(-4, args.pairs):
                found = {way: block(turn, select, way) for way in ((None, top_k) if turn % 2 else (top_k, None))}
                if turn >= 0:  # those before warm up
                    for seconds, way in zip(times, (None, top_k), strict=True):
                        seconds.append(found[way][0])
                    same.append((found[None][1] == found[top_k][1]).float().mean().item())
            ratio = statistics.median(few / whole for whole, few in zip(*times, strict=True))
            whole, few = (1000 * statistics.median(seconds) for seconds in times)
            print(f"{select.__name__}, top_k {top_k}: {whole:.1f} ms whole, {few:.1f} ms, ratio {ratio:.2f}", end="")
            print(f", same tokens {statistics.fmean(same):.1%}" if select is most_likely else "", flush=True)


if __name__ == "__main__":
    main()
