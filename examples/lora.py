"""Fine-tune a drafter on a data folder of your own with LoRA, and save it merged.

    dspark prepare-data --prompts prompts.jsonl --output data
    python examples/lora.py --data data --output tuned-drafter
    python examples/lora.py --target MODEL --drafter DRAFTER --data data --output tuned-drafter --steps 500

`dspark train --drafter DRAFTER --lora_rank 16` does the same with all options of the Trainer.
"""

import argparse

from peft import LoraConfig, get_peft_model

from dspark_hf.data import load_training_data, split_by_prompt
from dspark_hf.loading import load_pair
from dspark_hf.trainer import DSparkTrainer
from dspark_hf.training_arguments import DSparkTrainingArguments


def main() -> None:
    """Adapters on the attention, the small heads as a whole; the rest of the drafter and the target stay frozen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo", help="folder or Hub id; default: the demo's target")
    parser.add_argument("--drafter", help="folder or Hub id of a drafter for it; default: the demo's")
    parser.add_argument("--data", required=True, help="folder that `dspark prepare-data` wrote")
    parser.add_argument("--output", required=True, help="folder for the drafter")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    training, held_out = split_by_prompt(load_training_data(args.data), held_out=0.1)
    pair = load_pair(args.target, args.drafter)
    drafter = pair.drafter.float()  # small steps are lost in bfloat16
    heads = [name for name in ("markov_head", "confidence_head") if getattr(drafter, name) is not None]
    lora = LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        modules_to_save=heads,
    )
    arguments = DSparkTrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        learning_rate=5e-4,
        num_anchors=32,
        max_length=512,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=pair.target.device.type == "cpu",
    )
    trainer = DSparkTrainer(get_peft_model(drafter, lora), arguments, pair.target, training, held_out)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.model = trainer.model.merge_and_unload()
    trainer.save_model()
    print(f"loss on {len(held_out)} held-out texts: {before['eval_loss']:.3f} before, {after['eval_loss']:.3f} after")
    print(f"Written: {args.output}")


if __name__ == "__main__":
    main()
