"""Score a target with lm-evaluation-harness, its texts generated with a drafter; `--compare` scores it without, too.

    pip install -e ".[lm-eval]"
    python examples/evaluate_with_lm_eval.py --tasks gsm8k --limit 20 --chat --compare
    python examples/evaluate_with_lm_eval.py --tasks my_task --include-path FOLDER --target MODEL --drafter DRAFTER

In float32 greedy texts, and with them the scores, are the same; in bfloat16 near-ties may fall the other way.
"""

import argparse
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, StoppingCriteriaList

from dspark_hf import DSparkDraftModel
from dspark_hf.loading import load_pair


class DrafterLM(HFLM):
    """The harness's model with a drafter. What is scored without generating (log-likelihoods) has no use for it."""

    def __init__(self, pretrained: PreTrainedModel, drafter: DSparkDraftModel, **options: Any):
        super().__init__(pretrained, **options)
        self.drafter = drafter

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        def stops(input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
            # The harness's own criterion remembers rows by their place in the batch, but they are asked about one at
            # a time; that of Transformers, `stop_strings`, also looks into the prompt.
            texts = self.tokenizer.batch_decode(input_ids[:, context.shape[1] :])
            return torch.tensor([any(string in text for string in stop) for text in texts], device=input_ids.device)

        if not options.get("do_sample"):
            options.pop("temperature", None)
        return self.model.generate(
            context,
            assistant_model=self.drafter,
            max_length=max_length,
            stopping_criteria=StoppingCriteriaList([stops]),
            pad_token_id=self.tokenizer.pad_token_id,
            **options,
        )


def main() -> None:
    """Evaluate, print the scores and, with `--compare`, how many texts are the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo", help="folder or Hub id; default: the demo's target")
    parser.add_argument("--drafter", help="folder or Hub id of a drafter for it; default: the demo's")
    parser.add_argument("--tasks", nargs="+", default=["gsm8k"])
    parser.add_argument("--include-path", help="folder of tasks of your own, in place of the harness's")
    parser.add_argument("--limit", type=int, help="samples of each task")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--dtype", default="float32", help="auto for that of the checkpoint; default: %(default)s")
    parser.add_argument("--chat", action="store_true", help="questions as turns of the tokenizer's chat template")
    parser.add_argument("--compare", action="store_true", help="evaluate without the drafter, too")
    args = parser.parse_args()

    pair = load_pair(args.target, args.drafter, args.dtype)
    options = {"tokenizer": pair.tokenizer, "batch_size": args.batch_size}
    models = {"with drafter": DrafterLM(pair.target, pair.drafter, **options)}
    if args.compare:
        models["without"] = HFLM(pair.target, **options)
    tasks = TaskManager(include_path=args.include_path, include_defaults=args.include_path is None)
    asked = {"tasks": args.tasks, "limit": args.limit, "apply_chat_template": args.chat, "task_manager": tasks}
    texts = []
    for name, model in models.items():
        found = simple_evaluate(model, **asked, bootstrap_iters=0)
        for task, scores in found["results"].items():
            print(f"{name}: {task}", {key: float(value) for key, value in scores.items() if isinstance(value, float)})
        texts.append([sample["resps"] for task in found["samples"].values() for sample in task])
    if args.compare:
        print(f"the same text: {sum(a == b for a, b in zip(*texts, strict=True))} of {len(texts[0])}")


if __name__ == "__main__":
    main()
