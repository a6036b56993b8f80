"""A drafter on its way to the Hub: checked, staged as a complete repository, uploaded in one commit."""

from __future__ import annotations

import fnmatch
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .card import FIGURES_FOLDER, PLOT_NAME, CardSources, hub_id, is_unedited, plot_file, render_card
from .card_inputs import TRAINING_NAME
from .hub_only import FOLDER, write_custom_generate
from .modeling import DSparkDraftModel


if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi

CARD_NAME = "README.md"
COMMIT_MESSAGE = "Upload DSpark drafter"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.joblib")
# The state of a training run: pickles too, but not of the drafter, and left where they are.
TRAINING_STATE = ("training_args.bin", "optimizer.*", "scheduler.*", "scaler.*", "rng_state*")
# Parts of a checkpoint that are a target's, by the head of their names.
_TARGET_PARTS = ("target", "target_model", "teacher", "verifier", "base_model")
# What a repository may hold of an earlier push that would not belong to the new weights.
_OURS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    TRAINING_NAME,
    PLOT_NAME,
    f"{FIGURES_FOLDER}/*",
    f"{FOLDER}/*",
)

logger = logging.getLogger(__name__)


def push_drafter(
    drafter: str | Path | DSparkDraftModel,
    repo_id: str,
    sources: CardSources | None = None,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = COMMIT_MESSAGE,
    token: str | bool | None = None,
    overwrite_card: bool = False,
) -> CommitInfo:
    """
    Check a drafter, stage it with its code, provenance, figures and card, and upload it in one commit.

    Args:
        drafter (`str`, `Path` or [`DSparkDraftModel`]): A folder, with the `training.json` that training left there;
            or a model, of which nothing else is known.
        repo_id (`str`): NAMESPACE/NAME; created if it is not there.
        sources ([`CardSources`], *optional*): What the card is made from besides the folder.
        private (`bool`, *optional*): Whether a new repository is private; by default as the namespace has it.
        revision (`str`, *optional*): Branch, created if it is not there; by default the main one.
        commit_message (`str`, *optional*): First line of the commit's message.
        token (`str` or `bool`, *optional*): By default the stored one, or that of the environment.
        overwrite_card (`bool`, *optional*, defaults to `False`): Whether to replace a card on the Hub that is not as
            this function wrote it. It is kept otherwise, and a warning says so.

    Returns:
        `CommitInfo`: the commit; its `repo_url` leads to the repository.

    Raises:
        `ValueError`: the drafter, a file or an argument cannot be used. Nothing was sent.
        `huggingface_hub.errors.HfHubHTTPError`: the Hub refused, or could not be reached.
    """
    check_repo_id(repo_id)
    with tempfile.TemporaryDirectory(prefix="dspark-push-") as scratch:
        staged = Path(scratch) / "repository"
        with folder_of(drafter) as folder:
            stage_drafter(folder, staged, repo_id, sources)
        return upload(
            staged,
            repo_id,
            private=private,
            revision=revision,
            commit_message=commit_message,
            token=token,
            overwrite_card=overwrite_card,
        )


def check_repo_id(repo_id: str) -> None:
    """
    Refuse what cannot be a repository of one's own.

    Raises:
        `ValueError`: saying what is allowed.
    """
    if hub_id(repo_id) is None:
        raise ValueError(
            f"The repository {repo_id!r} cannot be: give NAMESPACE/NAME, each of letters, digits, '-', '_' and '.', "
            "96 characters at most."
        )


@contextmanager
def folder_of(drafter: str | Path | DSparkDraftModel) -> Iterator[Path]:
    """The folder of a drafter; a model is saved into one for the while."""
    if isinstance(drafter, (str, Path)):
        yield Path(drafter).expanduser()
        return
    if not isinstance(drafter, DSparkDraftModel):
        raise ValueError(
            f"`drafter` is a {type(drafter).__name__}; give a drafter's folder, or a DSparkDraftModel (unwrapped)."
        )
    with tempfile.TemporaryDirectory(prefix="dspark-drafter-") as scratch:
        folder = Path(scratch) / "drafter"
        drafter.save_pretrained(folder)
        yield folder


def load_strictly(folder: Path) -> DSparkDraftModel:
    """
    Load a drafter that is to be published.

    Args:
        folder (`Path`): As `save_pretrained` or DeepSpec wrote it.

    Returns:
        [`DSparkDraftModel`]: in the dtype it was saved in.

    Raises:
        `ValueError`: it is no drafter, it is not whole, a target is saved with it, or there are pickles.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; give the folder that `save_pretrained` wrote.")
    pickles = [
        path.name
        for path in sorted(folder.iterdir())
        if _matches(path.name, PICKLES) and not _matches(path.name, TRAINING_STATE)
    ]
    if pickles:
        raise ValueError(
            f"{folder} holds {', '.join(pickles)}, pickles, which run code when they are loaded; only safetensors are "
            "published. Save the drafter anew with `save_pretrained` and remove them."
        )
    try:
        return DSparkDraftModel.from_pretrained(folder, dtype="auto")
    except ValueError as error:
        inside = _target_tensors(folder)
        if not inside:
            raise
        raise ValueError(
            f"{folder} holds the target as well ({len(inside)} tensors, {inside[0]} the first); save the drafter "
            "alone: `drafter.save_pretrained(...)`."
        ) from error


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _target_tensors(folder: Path) -> list[str]:
    """Names of tensors of a target in a folder's safetensors files."""
    from safetensors import safe_open

    names: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            names += tensors.keys()
    return sorted(name for name in names if name.split(".")[0] in _TARGET_PARTS)


def stage_drafter(folder: Path, staged: Path, repo_id: str, sources: CardSources | None = None) -> None:
    """
    Write the complete repository of a drafter into a folder: weights, config, generation config, code (of the
    drafter, and of decoding), provenance, figures, calibration plot and card. The drafter's own folder is only read.

    Args:
        folder (`Path`): The drafter's.
        staged (`Path`): Created; must not exist, or be empty.
        repo_id (`str`): What the card's code loads.
        sources ([`CardSources`], *optional*): What the card is made from besides the folder.

    Raises:
        `ValueError`: the drafter or a file cannot be used.
    """
    sources = sources or CardSources()
    drafter = load_strictly(folder)
    card = render_card(drafter, folder, sources, repo_id)
    figures = [Path(file).expanduser() for file in (*sources.evaluations, *sources.benchmarks)]
    names = [path.name for path in figures]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Two of the files with figures are named {twice[0]}; rename one, they share a folder.")
    plot = plot_file(folder, sources)
    if plot is not None and (not plot.is_file() or plot.suffix.lower() != ".png"):
        raise ValueError(f"The plot {str(plot)!r} is no PNG file; draw one with `dspark calibrate --plot`.")

    drafter.save_pretrained(staged)
    write_custom_generate(staged, repo_id)
    if (folder / TRAINING_NAME).is_file():
        shutil.copyfile(folder / TRAINING_NAME, staged / TRAINING_NAME)
    if plot is not None:
        shutil.copyfile(plot, staged / PLOT_NAME)
    if figures:
        (staged / FIGURES_FOLDER).mkdir()
    for path in figures:
        shutil.copyfile(path, staged / FIGURES_FOLDER / path.name)
    (staged / CARD_NAME).write_text(card, encoding="utf-8")


def upload(
    staged: Path,
    repo_id: str,
    *,
    private: bool | None,
    revision: str | None,
    commit_message: str,
    token: str | bool | None,
    overwrite_card: bool,
) -> CommitInfo:
    """
    Upload a staged repository in one commit. Arguments as for [`push_drafter`].

    Raises:
        `ValueError`: the repository holds another model, or was to be private and is public. Nothing was sent.
        `huggingface_hub.errors.HfHubHTTPError`: the Hub refused, or could not be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    if private and not api.model_info(repo_id).private:
        raise ValueError(
            f"The repository {repo_id!r} exists and is public, so what is sent there would be; change that in its "
            "settings, or give another name. Nothing was sent."
        )
    if revision is not None and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    _check_replaceable(file_on_hub(api, repo_id, "config.json", revision), repo_id)
    existing = file_on_hub(api, repo_id, CARD_NAME, revision)
    kept = existing is not None and not is_unedited(existing) and not overwrite_card
    if kept:
        logger.warning(
            "%s of %s was not written by dspark, or edited since: it stays as it is. --overwrite-card "
            "(`overwrite_card=True`) replaces it.",
            CARD_NAME,
            repo_id,
        )
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=staged,
        revision=revision,
        commit_message=commit_message,
        ignore_patterns=[CARD_NAME] if kept else [],
        delete_patterns=list(_OURS),
    )


def file_on_hub(api: HfApi, repo_id: str, name: str, revision: str | None) -> str | None:
    """A text file that a repository has now, asked of the Hub and not of the cache; `None` if it has none."""
    from huggingface_hub.errors import RemoteEntryNotFoundError

    with tempfile.TemporaryDirectory(prefix="dspark-file-") as folder:
        try:
            path = api.hf_hub_download(repo_id, name, revision=revision, local_dir=folder)
        except RemoteEntryNotFoundError:
            return None
        return Path(path).read_text(encoding="utf-8")


def _check_replaceable(config: str | None, repo_id: str) -> None:
    """Refuse to put a drafter in place of another kind of model, whose weights would go."""
    if config is None:
        return
    raw = json.loads(config)
    architectures = raw.get("architectures") or []
    if raw.get("model_type") != "dspark" and not any("DSpark" in name for name in architectures):
        raise ValueError(
            f"The repository {repo_id!r} holds another model (model_type {raw.get('model_type')!r}), which this would "
            "replace; give a repository of the drafter's own. Nothing was sent."
        )
