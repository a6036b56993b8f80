"""`dspark train`: a drafter for a target from the target's own texts, with the Trainer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_callback import TrainerState

from .card_inputs import RUN, TRAINING_NAME
from .command_files import check_plot
from .data import TRAINING_COLUMNS, import_datasets, load_training_data, split_by_prompt
from .demo_target import demo_drafter_folder
from .initialisation import (
    change_vocabulary,
    choose_mask_token,
    drafter_config,
    frequent_tokens,
    start_from_target,
)
from .loading import DEMO, DTYPES, CommandError, check_source, load_target, load_tokenizer, reporting, training_record
from .modeling import DSparkDraftModel
from .modeling.configuration_dspark import MARKOV_HEAD_TYPES
from .target_outputs import text_config
from .trainer import STATE_NAME, DSparkTrainer, inner_drafter, is_whole, last_whole_checkpoint
from .training_arguments import DSparkTrainingArguments
from .training_callbacks import DecodeEvaluation, plot_run


LORA_LAYERS = r"(fc|layers\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj))"
HEADS = ("markov_head", "confidence_head")
# Fields of a drafter's config that a run cannot change on its way.
SHAPE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "target_layer_ids", "block_size", "mask_token_id"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "draft_vocab_size"),
)
# Options that make a new drafter what it is, and that no training changes.
NEW = ("num_hidden_layers", "target_layer_ids", "markov_rank", "markov_head_type")
PROVENANCE = "provenance.json"


@dataclass
class ModelArguments:
    """The target, and the drafter to train: a new one, or one to go on from."""

    target: str = field(default=DEMO, metadata={"help": "Target: folder or Hub id; `demo` is SmolLM2-135M-Instruct."})
    drafter: str | None = field(
        default=None, metadata={"help": "Drafter to go on from: folder or Hub id, `demo`. By default a new one."}
    )
    dtype: str = field(default="auto", metadata={"help": "Of the target.", "choices": list(DTYPES)})
    device: str = field(default="auto", metadata={"help": "Of the target."})
    threads: int | None = field(default=None, metadata={"help": "CPU threads."})
    initialise_from: str = field(
        default="random",
        metadata={"help": "What a new drafter starts from.", "choices": ["random", "target"]},
    )
    num_hidden_layers: int | None = field(default=None, metadata={"help": "Depth of a new drafter; by default 5."})
    block_size: int | None = field(
        default=None, metadata={"help": "Draft tokens a round; by default 7, or those of `--drafter`."}
    )
    markov_rank: int | None = field(
        default=None, metadata={"help": "Rank of a new drafter's sequential head; by default 256, 0 for none."}
    )
    markov_head_type: str | None = field(
        default=None, metadata={"help": "Of a new drafter; by default vanilla.", "choices": list(MARKOV_HEAD_TYPES)}
    )
    confidence_head: bool = field(default=True, metadata={"help": "Whether a new drafter has a confidence head."})
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "Taps of a new drafter; by default spread over the target."}
    )
    mask_token_id: int | None = field(
        default=None, metadata={"help": "Fills a new drafter's blocks; by default a special token that is free."}
    )
    draft_vocab_size: int | None = field(
        default=None,
        metadata={"help": "Draft only so many tokens, those that the target writes most often; by default all."},
    )
    lora_rank: int = field(
        default=0, metadata={"help": "Train LoRA adapters of this rank (and the heads) instead of all weights."}
    )


@dataclass
class DataArguments:
    """What is trained on."""

    data: list[str] = field(default_factory=list, metadata={"help": "Folders that `dspark prepare-data` wrote."})
    held_out: float = field(default=0.02, metadata={"help": "Share of the prompts that is only evaluated on."})
    max_held_out: int = field(default=128, metadata={"help": "The most samples that an evaluation reads."})
    max_samples: int | None = field(default=None, metadata={"help": "The most samples that are trained on."})
    plot: str | None = field(default=None, metadata={"help": "PNG of the run (needs matplotlib)."})


def main(argv: Sequence[str]) -> int:
    """
    Run `dspark train`.

    Args:
        argv (`Sequence[str]`): What follows `train`.

    Raises:
        [`CommandError`]: for what cannot be used.
    """
    model_arguments, data_arguments, arguments = parse(argv)
    with reporting("training"):
        import_datasets()
    if not data_arguments.data:
        raise CommandError("--data is missing; give one or more folders that `dspark prepare-data` wrote")
    check_plot(data_arguments.plot)
    train(model_arguments, data_arguments, arguments)
    return 0


class _OneLineParser(HfArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see `dspark train --help`)")


def parse(argv: Sequence[str]) -> tuple[ModelArguments, DataArguments, DSparkTrainingArguments]:
    """The arguments by group; those of the command line come before those of `--config FILE`."""
    parser = _OneLineParser(
        (ModelArguments, DataArguments, DSparkTrainingArguments),
        prog="dspark train",
        description="Train a drafter. Between --output_dir and --cross_entropy_weight stand the options of "
        "Transformers' Trainer; before and after them, those of drafters.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="YAML file with any of the options; the command line goes before it")
    # The Trainer would write into ./trainer_output.
    next(action for action in parser._actions if action.dest == "output_dir").required = True
    config = _config_file(list(argv))
    unknown = sorted(map(str, config.keys() - {action.dest for action in parser._actions}))
    if unknown:
        raise CommandError(
            f"--config: it names {', '.join(unknown)}, which no option is called; see `dspark train -h`"
        )
    # As arguments in front of the others, so that the file's values are read and checked like theirs.
    given = [text for name, value in config.items() for text in _as_arguments(name, value)]
    with reporting("the training's arguments"):
        model_arguments, data_arguments, arguments, *_ = parser.parse_args_into_dataclasses([*given, *argv])
    return model_arguments, data_arguments, arguments


def _config_file(argv: list[str]) -> dict[str, Any]:
    for index, value in enumerate(argv):
        path = argv[index + 1 : index + 2] if value == "--config" else [value.removeprefix("--config=")]
        if value == "--config" or value.startswith("--config="):
            if not path or not Path(path[0]).is_file():
                raise CommandError(f"--config {path[0] if path else ''!r}: there is no such file")
            try:
                found = yaml.safe_load(Path(path[0]).read_text(encoding="utf-8"))
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise CommandError(f"--config {path[0]!r}: {' '.join(str(error).split())}") from error
            if not isinstance(found, dict):
                raise CommandError(f"--config {path[0]!r}: it must hold one option a line, `name: value`")
            return found
    return {}


def _as_arguments(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, dict):
        return [f"--{name}", json.dumps(value)]
    values = value if isinstance(value, list) else [value]
    # YAML takes an unquoted `no`, which some options are set to, for a false one.
    plain = ["no" if v is False and name.endswith("_strategy") else str(v) for v in values]
    return [f"--{name}", *plain] if plain else []


def train(
    model_arguments: ModelArguments, data_arguments: DataArguments, arguments: DSparkTrainingArguments
) -> DSparkTrainer:
    """
    Load, train, evaluate, save.

    Returns:
        [`DSparkTrainer`]: After training.
    """
    check_source("--target", model_arguments.target)
    if model_arguments.drafter is not None:
        check_source("--drafter", model_arguments.drafter)
    seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
    if not 0 <= arguments.seed < 2**32:
        raise CommandError(f"--seed {arguments.seed}: it must be from 0 to 2^32 - 1")
    if model_arguments.lora_rank < 0:
        raise CommandError(f"--lora_rank {model_arguments.lora_rank}: it must be at least 0 (no adapters)")
    training, held_out, origin = read_data(data_arguments, seed)
    set_seed(arguments.seed)
    target, _ = load_target(
        model_arguments.target, model_arguments.dtype, model_arguments.device, model_arguments.threads
    )
    tokenizer = load_tokenizer(model_arguments.target)
    cut = check_tokens(training, text_config(target).vocab_size, arguments.max_length)
    if cut and arguments.process_index == 0:
        print(
            f"{cut} of {len(training)} samples teach nothing: --max_length {arguments.max_length} cuts their answers"
        )
    drafter = make_drafter(model_arguments, target, tokenizer, training)
    model = with_lora(drafter, model_arguments.lora_rank) if model_arguments.lora_rank else drafter
    provenance = {
        "target": {
            "id": model_arguments.target,
            "revision": getattr(target.config, "_commit_hash", None),
            "dtype": str(target.dtype).removeprefix("torch."),
        },
        "data": origin,
        "started_from": model_arguments.drafter or model_arguments.initialise_from,
    }
    if earlier := earlier_runs(model_arguments.drafter):
        provenance["earlier_runs"] = earlier
    decoding = DecodeEvaluation(target, tokenizer, held_out, arguments.decode_samples, arguments.decode_tokens)
    with reporting("the training"):
        try:
            trainer = DSparkTrainer(
                model=model,
                args=arguments,
                target=target,
                train_dataset=training,
                eval_dataset=held_out if len(held_out) else None,
                decode=decoding if decoding.prompts else None,
                provenance=provenance,
            )
        except RuntimeError as error:  # loggers that are not installed, for one
            raise ValueError(error) from error
    resume = arguments.resume_from_checkpoint
    if resume in (None, "True", "true"):
        resume = last_whole_checkpoint(arguments.output_dir)
    if resume is not None:
        if not is_whole(Path(resume)):
            raise CommandError(f"--resume_from_checkpoint {resume!r}: it is no checkpoint that was saved whole")
        check_resumed(Path(resume), drafter, provenance, arguments.output_dir)
        if is_done(Path(resume), arguments):
            print(f"{arguments.output_dir} holds a run that is done: nothing is left to do")
            return trainer
    trainer.train(resume_from_checkpoint=resume)
    if len(held_out):
        trainer.evaluate()
    if model_arguments.lora_rank:
        # The adapters lie in the checkpoints; what is shipped is one drafter.
        trainer.model = trainer.model.merge_and_unload()
    trainer.save_model()
    trainer.save_state()
    if data_arguments.plot is not None and trainer.is_world_process_zero():
        block_size = inner_drafter(trainer.model).config.block_size
        plot_run(Path(data_arguments.plot).expanduser(), trainer.state.log_history, block_size)
    if trainer.is_world_process_zero():
        print(f"Written: {arguments.output_dir}")
    return trainer


def is_done(checkpoint: Path, arguments: DSparkTrainingArguments) -> bool:
    """Whether a run has all its steps, or all its time, and has saved what came of it."""
    if not (Path(arguments.output_dir) / TRAINING_NAME).is_file():
        return False
    state = TrainerState.load_from_json(str(checkpoint / STATE_NAME))
    if arguments.time_limit is not None:
        origin = json.loads((checkpoint / TRAINING_NAME).read_text(encoding="utf-8"))
        return origin["seconds"] >= 60 * arguments.time_limit
    if arguments.max_steps > 0:
        return arguments.max_steps <= state.global_step
    return state.epoch is not None and arguments.num_train_epochs <= state.epoch


def check_resumed(checkpoint: Path, drafter: DSparkDraftModel, provenance: dict[str, Any], output_dir: str) -> None:
    """
    Refuse to go on with another drafter, target or data than a run was begun with.

    Raises:
        [`CommandError`]: naming what differs.
    """
    other = []
    if (checkpoint / "config.json").is_file():  # adapters have none
        begun = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        now = json.loads(json.dumps(drafter.config.to_dict()))
        changed = [name for name in SHAPE if begun.get(name) != now[name]]
        other = [f"{name} {begun.get(name)} there and {now[name]} here" for name in changed]
    begun = json.loads((checkpoint / TRAINING_NAME).read_text(encoding="utf-8"))
    now = json.loads(json.dumps(provenance))
    for name, words in (("target", "another target"), ("data", "other data"), ("started_from", "another start")):
        if begun[name] != now[name]:
            other.append(words)
    if other:
        raise CommandError(
            f"--output_dir {output_dir!r}: it holds the run of another drafter ({'; '.join(other)}); give another "
            "folder, or the options that it was begun with"
        )


def check_tokens(samples: Any, vocab_size: int, max_length: int) -> int:
    """
    Refuse samples that cannot be trained on, before the training comes to them.

    Returns:
        `int`: How many hold something to learn, but beyond `max_length`.

    Raises:
        [`CommandError`]: saying what is wrong with them.
    """
    supervised, reached = 0, 0
    for number, (token_ids, mask) in enumerate(zip(samples["input_ids"], samples["loss_mask"], strict=True), start=1):
        if len(token_ids) != len(mask):
            raise CommandError(
                f"--data: sample {number} has {len(token_ids)} `input_ids` and {len(mask)} entries in its `loss_mask`"
            )
        if not all(isinstance(token, int) and 0 <= token < vocab_size for token in token_ids):
            raise CommandError(
                f"--data: sample {number} has `input_ids` that are no tokens of the target, 0 to {vocab_size - 1}; "
                "make the data with `dspark prepare-data` and the same target"
            )
        first = next((place for place, pair in enumerate(zip(mask, mask[1:], strict=False)) if all(pair)), None)
        supervised += first is not None
        reached += first is not None and first + 2 <= max_length
    if not supervised:
        raise CommandError(
            "--data: no sample has two tokens in a row that the target wrote (`loss_mask`): there is nothing to learn"
        )
    if not reached:
        raise CommandError(
            f"--max_length {max_length}: no sample has two tokens of the target's own within it, all prompts are "
            "longer; give a greater length"
        )
    return supervised - reached


def read_data(arguments: DataArguments, seed: int) -> tuple[Any, Any, dict[str, Any]]:
    """
    The samples to train on and to evaluate on, as `datasets.Dataset`, and where they come from.

    Raises:
        [`CommandError`]: for folders that hold no training data.
    """
    concatenate_datasets = import_datasets().concatenate_datasets
    parts, origins = [], []
    for folder in arguments.data:
        with reporting(f"--data {folder!r}"):
            parts.append(load_training_data(folder))
        origins.append(_origin(folder))
    columns = [name for name in TRAINING_COLUMNS if all(name in part.column_names for part in parts)]
    samples = concatenate_datasets([part.select_columns(columns) for part in parts])
    for name in ("max_held_out", "max_samples"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise CommandError(f"--{name} {getattr(arguments, name)}: it must be at least 1")
    if not 0 <= arguments.held_out < 1:
        raise CommandError(f"--held_out {arguments.held_out}: it must be at least 0 (train on everything) and below 1")
    training, held_out = samples, samples.select(())
    if arguments.held_out:
        with reporting(f"--held_out {arguments.held_out}"):
            training, held_out = split_by_prompt(samples, arguments.held_out, seed=seed)
    if arguments.max_samples is not None and arguments.max_samples < len(training):
        training = training.shuffle(seed=seed, keep_in_memory=True).select(range(arguments.max_samples))
    held_out = held_out.shuffle(seed=seed, keep_in_memory=True)
    held_out = held_out.select(range(min(len(held_out), arguments.max_held_out)))
    if len(origins) == 1 and "samples" in origins[0]:
        return training, held_out, origins[0]
    together = {
        "samples": len(samples),
        "tokens": sum(map(len, samples["input_ids"])),
        "supervised_tokens": sum(map(sum, samples["loss_mask"])),
    }
    return training, held_out, together | (origins[0] if len(origins) == 1 else {"parts": origins})


def _origin(folder: str) -> dict[str, Any]:
    """What `dspark prepare-data` says of a folder of training data."""
    path = Path(folder).expanduser() / PROVENANCE
    if not path.is_file():
        return {"folder": folder}
    with reporting(f"--data {folder!r}: its {PROVENANCE} cannot be read; remove it, or make the data again"):
        origin = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(origin, dict):
            raise ValueError("it is no JSON object")
    return origin


def earlier_runs(drafter: str | None) -> list[dict[str, Any]]:
    """
    How the drafter that a run goes on from was trained, the oldest run first, as far as a `training.json`
    beside it says.

    Raises:
        [`CommandError`]: if there is one that cannot be read.
    """
    training = {} if drafter is None else training_record(drafter, "--drafter")
    if not training:
        return []
    last = {name: training[name] for name in RUN if name in training}
    return [*training.get("earlier_runs", []), last]


def make_drafter(
    arguments: ModelArguments, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Any
) -> DSparkDraftModel:
    """The drafter to train, in float32 and on the target's device: that of `--drafter`, else a new one."""
    size, token_ids = arguments.draft_vocab_size, None
    if size is not None:
        ends = target.generation_config.eos_token_id
        texts = zip(samples["input_ids"], samples["loss_mask"], strict=True)
        always = [] if ends is None else [ends] if isinstance(ends, int) else ends
        with reporting(f"--draft_vocab_size {size}"):
            token_ids = frequent_tokens(texts, size, text_config(target).vocab_size, always)
    if arguments.drafter is not None:
        with reporting(f"--drafter {arguments.drafter!r}"):
            source = demo_drafter_folder() if arguments.drafter == DEMO else arguments.drafter
            drafter = DSparkDraftModel.from_pretrained(source, dtype=torch.float32).to(target.device)
            check_shape(arguments, drafter)
            # They were fitted to the weights that are about to change.
            drafter.config.confidence_temperatures = None
            if arguments.block_size is not None:  # no weight depends on it
                drafter.config.block_size = arguments.block_size
                drafter.config.validate_drafter()
            return drafter if token_ids is None else change_vocabulary(drafter, token_ids)
    with reporting("the new drafter"):
        mask_token_id = arguments.mask_token_id
        if mask_token_id is None:
            mask_token_id = choose_mask_token(tokenizer)
        config = drafter_config(
            target,
            mask_token_id,
            **{name: value for name in ("block_size", *NEW) if (value := getattr(arguments, name)) is not None},
            enable_confidence_head=arguments.confidence_head,
            draft_vocab_size=size,
        )
        drafter = DSparkDraftModel(config)
        if token_ids is not None:
            drafter.set_draft_vocabulary(token_ids)
        if arguments.initialise_from == "target":
            start_from_target(drafter, target)
    return drafter.to(target.device)


def check_shape(arguments: ModelArguments, drafter: DSparkDraftModel) -> None:
    """
    Refuse options of a new drafter that are not those of the one to go on from.

    Raises:
        `ValueError`: naming the first.
    """
    for name in (*NEW, "mask_token_id"):
        given, own = getattr(arguments, name), getattr(drafter.config, name)
        if given is not None and given != own:
            raise ValueError(f"its `{name}` is {own}; training does not change that: leave out --{name} {given}")


def with_lora(drafter: DSparkDraftModel, rank: int) -> Any:
    """LoRA adapters on the backbone's projections; the heads are trained as a whole, being small."""
    from peft import LoraConfig, get_peft_model

    heads = [name for name in HEADS if getattr(drafter, name) is not None]
    # PEFT would read the config of where it came from at each save, which may be in another format.
    drafter.name_or_path = ""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LORA_LAYERS, modules_to_save=heads)
    return get_peft_model(drafter, config)
