"""`dspark card` and `dspark push`: a drafter's model card, and the drafter with all that belongs to it to the Hub."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .card_inputs import read_benchmark, read_evaluation
from .command_files import check_writable
from .files import write_text
from .loading import CommandError, reporting


def card(
    *,
    folder: str,
    evaluations: Sequence[str],
    benchmarks: Sequence[str],
    target: str | None,
    licence: str | None,
    datasets: Sequence[str],
    repo_id: str | None,
    output: str | None,
) -> int:
    """`dspark card`: render, and print or write. The command line's help says what is what.

    Returns:
        `int`: the exit code, 0.

    Raises:
        `CommandError`: something given cannot be used.
    """
    check_writable("--output", output)
    path = _check_files(folder, evaluations, benchmarks)

    from .card import CardSources, render_card
    from .hub import check_repo_id, load_strictly

    if repo_id is not None:
        with reporting("--repo-id"):
            check_repo_id(repo_id)
    sources = CardSources(evaluations, benchmarks, target=target, licence=licence, datasets=datasets)
    with reporting(f"FOLDER {folder!r}"):
        text = render_card(load_strictly(path), path, sources, repo_id)
    if output is None:
        print(text, end="")
        return 0
    with reporting(f"--output {output!r}"):
        write_text(Path(output).expanduser(), text)
    print(f"Written: {output}")
    return 0


def push(
    *,
    folder: str,
    repo_id: str,
    evaluations: Sequence[str],
    benchmarks: Sequence[str],
    plot: str | None,
    target: str | None,
    licence: str | None,
    datasets: Sequence[str],
    private: bool,
    revision: str | None,
    message: str | None,
    overwrite_card: bool,
    dry_run: bool,
) -> int:
    """`dspark push`: check, stage and upload. The command line's help says what is what.

    Returns:
        `int`: the exit code, 0.

    Raises:
        `CommandError`: something given cannot be used, or the Hub did not take it.
    """
    path = _check_files(folder, evaluations, benchmarks)

    from .card import CardSources
    from .hub import COMMIT_MESSAGE, check_repo_id, stage_drafter, upload

    with reporting("REPO_ID"):
        check_repo_id(repo_id)
    sources = CardSources(evaluations, benchmarks, plot, target, licence, datasets)
    if dry_run:
        staged = Path(tempfile.mkdtemp(prefix="dspark-push-"))
        with reporting(f"FOLDER {folder!r}"):
            stage_drafter(path, staged, repo_id, sources)
        print(f"Nothing was sent. {repo_id} would get what lies in {staged}:")
        for file in sorted(file for file in staged.rglob("*") if file.is_file()):
            print(f"  {file.relative_to(staged)} ({file.stat().st_size:,} bytes)")
        return 0
    with tempfile.TemporaryDirectory(prefix="dspark-push-") as scratch:
        staged = Path(scratch)
        with reporting(f"FOLDER {folder!r}"):
            stage_drafter(path, staged, repo_id, sources)
        with _reporting_hub(repo_id):
            commit = upload(
                staged,
                repo_id,
                private=private or None,
                revision=revision,
                commit_message=message or COMMIT_MESSAGE,
                token=None,
                overwrite_card=overwrite_card,
            )
        print(f"Pushed: {commit.repo_url} ({commit.commit_url})")
        print(f"Use it: {_usage(staged, repo_id, revision)}")
    return 0


def _check_files(folder: str, evaluations: Sequence[str], benchmarks: Sequence[str]) -> Path:
    """The drafter's folder, after everything that can be refused before torch is imported."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise CommandError(f"FOLDER {folder!r}: there is no such folder; give a drafter's")
    for file in evaluations:
        with reporting("--eval"):
            read_evaluation(file)
    for file in benchmarks:
        with reporting("--bench"):
            read_benchmark(file)
    return path


def _usage(staged: Path, repo_id: str, revision: str | None) -> str:
    """What to type to use what was pushed."""
    if revision is not None:
        return f"DSparkDraftModel.from_pretrained({repo_id!r}, revision={revision!r})"

    from huggingface_hub import ModelCard

    target = ModelCard.load(staged / "README.md").data.base_model or "TARGET"
    command = ["dspark", "generate", "--target", target, "--drafter", repo_id, "--chat", "--prompt", "What is 12 * 7?"]
    return shlex.join(command)


@contextmanager
def _reporting_hub(repo_id: str) -> Iterator[None]:
    """Turn what the Hub, or the way there, does not let through into a [`CommandError`] that says what to change."""
    # HTTPError is what the HTTP client of huggingface_hub raises, whichever client that is; it is no OSError.
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        # A failed upload of a large file is a RuntimeError around the answer.
        inner = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
        said = " ".join(str(inner).split())
        if isinstance(inner, HfHubHTTPError):
            said = _refusal(inner.response.status_code, inner.server_message or said, repo_id)
        elif isinstance(inner, (HTTPError, ConnectionError)):
            said = f"the Hub could not be reached ({said}); check the network and HF_ENDPOINT, then run this again"
        raise CommandError(f"REPO_ID {repo_id!r}: {said}") from error


def _refusal(status: int, message: str, repo_id: str) -> str:
    """An answer of the Hub in one line, with what to change."""
    said = f"{status}: {' '.join(message.split())}"
    if status == 401:
        return f"the Hub wants a valid token ({said}); run `hf auth login`, or set HF_TOKEN to one that may write"
    if status == 403:
        namespace = repo_id.partition("/")[0]
        return f"the Hub does not allow it ({said}); use a token that may write to {namespace!r}, or another NAMESPACE"
    if status == 404:
        return f"the Hub does not have it ({said}); check the name, --revision and whether the token may see it"
    if status == 429 or status >= 500:
        return f"the Hub failed ({said}); nothing here has changed: run this again later"
    return f"the Hub refused ({said})"
