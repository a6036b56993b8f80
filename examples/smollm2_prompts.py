"""Prompts to train a drafter on, from nothing but the installed packages: code, contest problems, mathematics,
everyday requests, programs, problems of the sciences, other languages, long texts.

    python examples/smollm2_prompts.py --count 4000 --output prompts.jsonl

A drafter learns the words that its target answers with, so what matters is that all kinds of questions are asked, not
that they can be answered. Code and long texts are those of Python's standard library; the rest is filled into the
templates of smollm2_prompts.yaml.
"""

import argparse
import ast
import copy
import json
import random
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import yaml


TEMPLATES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
Documented = ast.Module | ast.ClassDef | ast.FunctionDef
Passage = tuple[Documented, str, str]  # node, docstring and source


def library() -> Iterator[Passage]:
    """What is documented in Python's standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(folder.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib"} & set(file.parts):
            continue
        try:
            source = file.read_text(encoding="utf-8")
            nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, UnicodeDecodeError):  # files of its own tests
            continue
        lines = source.splitlines()
        for node in nodes:
            text = ast.get_docstring(node) if isinstance(node, Documented) else None
            if text is not None and len(text) >= 30:
                own = lines if isinstance(node, ast.Module) else lines[node.lineno - 1 : node.end_lineno]
                source = textwrap.dedent("\n".join(own))
                if not source[0].isspace():  # a text in it that is not indented
                    yield node, text, source


def code_prompts(draw: random.Random, documented: list[Passage]) -> list[str]:
    """To write, complete and explain functions of the standard library."""
    questions = {question["text"]: question["weight"] for question in TEMPLATES["questions"]}
    prompts = []
    for node, text, _ in documented:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__") or len(text) > 600:
            continue
        name = node.name.lstrip("_")
        signature = f"{name}({_arguments(node.args)})"
        indented = re.sub(r"\n(?=.)", "\n    ", text)
        head = f'def {signature}:\n    """{indented}\n    """'
        if not _is_code(head):  # a name that is none, or quotes in the text
            continue
        question = draw.choices(list(questions), list(questions.values()))[0]
        prompts.append(
            question.format(
                name=name,
                signature=signature,
                summary=" ".join(text.split("\n\n")[0].split()),
                head=head,
            )
        )
    return prompts


def _arguments(arguments: ast.arguments) -> str:
    """As in a signature, without the object that a method is called on."""
    arguments = copy.deepcopy(arguments)
    for names in (arguments.posonlyargs, arguments.args):
        if names and names[0].arg in ("self", "cls"):
            del names[0]
            break
    return ast.unparse(arguments)


def _is_code(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # backslashes
            ast.parse(text)
    except SyntaxError:
        return False
    return True


def long_prompts(draw: random.Random, documented: list[Passage]) -> list[str]:
    """About functions and documentation texts of the standard library, of 500 to 3,000 characters."""
    prompts = []
    for node, text, source in documented:
        if isinstance(node, ast.FunctionDef) and 500 <= len(source) <= 2500:
            review = draw.choice(TEMPLATES["reviews"])
            prompts.append(review.format(source=source, language=draw.choice(TEMPLATES["languages"])))
        if 500 <= len(text) <= 2800:
            prompts.append(draw.choice(TEMPLATES["readings"]).format(text=text))
    return prompts


def maths_prompts(draw: random.Random, count: int) -> list[str]:
    """Exercises in LaTeX with drawn numbers."""
    prompts = []
    for _ in range(count):
        ending = draw.choice(TEMPLATES["maths_endings"])
        prompts.append(draw.choice(TEMPLATES["maths"]).format(**_numbers(draw)) + ending)
    return prompts


def _numbers(draw: random.Random) -> dict[str, int]:
    """What an exercise is about."""
    return {name: draw.randint(2, 30) for name in "abc"} | {"d": draw.randint(2, 9)}


def contest_prompts(draw: random.Random, count: int) -> list[str]:
    """Programming problems with input, constraints and samples, which are drawn: the answers need not be right."""
    prompts = []
    for _ in range(count):
        kind = draw.choice(list(TEMPLATES["contest_inputs"]))
        described = TEMPLATES["contest_inputs"][kind]
        task = draw.choice(described["tasks"])
        story = draw.choice(TEMPLATES["contest_stories"]).format(what=described["what"])
        parts = [f"{story} {task[0].upper()}{task[1:]}.", "Input", "The input is given in the following format:"]
        parts += [described["order"], "Output", "Print the answer in one line.", "Constraints"]
        parts.append(f"- {described['bounds']} \\le {draw.choice(TEMPLATES['contest_limits'])}")
        for number in range(1, draw.randint(1, 3) + 1):
            parts += [f"Sample Input {number}", _sample(draw, kind)]
            parts += [f"Sample Output {number}", str(draw.randint(0, 20))]
        words = [word.capitalize() for word in re.findall("[A-Za-z]+", task)[:3]]
        name = words[0].lower() + "".join(words[1:])
        problem = {"problem": "\n\n".join(parts), "name": name, "signature": described["signature"]}
        prompts.append(draw.choice(TEMPLATES["contests"]).format(**problem))
    return prompts


def _sample(draw: random.Random, kind: str) -> str:
    """An input of a contest problem."""
    size = draw.randint(2, 6)
    if kind == "array":
        return f"{size} {draw.randint(1, 9)}\n" + " ".join(str(draw.randint(1, 20)) for _ in range(size))
    if kind == "string":
        letters = draw.choice(("ab", "abc", "OX", "LR", "abcdef"))
        return "".join(draw.choices(letters, k=size + 2)) + f"\n{draw.randint(1, 5)}"
    if kind == "grid":
        return "\n".join([f"{size} {size}", *("".join(draw.choices(".#", k=size)) for _ in range(size))])
    edges = (f"{draw.randint(1, size)} {draw.randint(1, size)} {draw.randint(1, 9)}" for _ in range(size))
    return "\n".join([f"{size} {size} {draw.randint(1, 4)}", *edges])


def request_prompts(draw: random.Random, count: int) -> list[str]:
    """Everyday requests."""
    prompts = []
    for _ in range(count):
        subject, other = draw.sample(TEMPLATES["subjects"], 2)
        people = {"person": draw.choice(TEMPLATES["people"]), "role": draw.choice(TEMPLATES["roles"])}
        prompts.append(draw.choice(TEMPLATES["requests"]).format(subject=subject, other=other, **people))
    return prompts


def program_prompts(draw: random.Random, count: int) -> list[str]:
    """Programs to write, in many languages and with many libraries."""
    slots = {"thing": "things", "language": "code_languages", "library": "libraries", "feature": "features"}
    return [
        draw.choice(TEMPLATES["programs"]).format(**{slot: draw.choice(TEMPLATES[key]) for slot, key in slots.items()})
        for _ in range(count)
    ]


def science_prompts(draw: random.Random, count: int) -> list[str]:
    """Problems of physics, chemistry and the like with drawn numbers."""
    return [draw.choice(TEMPLATES["sciences"]).format(**_numbers(draw)) for _ in range(count)]


def foreign_prompts(draw: random.Random, count: int) -> list[str]:
    """Requests in eleven other languages, each as likely."""
    prompts = []
    for _ in range(count):
        language = draw.choice(TEMPLATES["foreign"])
        word, other = draw.sample(language["words"], 2)
        prompts.append(draw.choice(language["texts"]).format(word=word, other=other, number=draw.randint(3, 30)))
    return prompts


def all_prompts(count: int, seed: int = 0) -> list[str]:
    """
    Different prompts of all kinds in drawn order.

    Args:
        count (`int`): How many there are to be, at least 1; fewer come where templates and library hold no more of a
            kind.
        seed (`int`, *optional*, defaults to 0): Of what is drawn.

    Raises:
        `ValueError`: if the count is less.
    """
    if count < 1:
        raise ValueError(f"`count` is {count}; give the number of prompts, at least 1.")
    draw, documented = random.Random(seed), list(library())
    kinds = [
        (0.20, code_prompts(draw, documented)),
        (0.16, long_prompts(draw, documented)),
        (0.14, maths_prompts(draw, count)),
        (0.12, contest_prompts(draw, count)),
        (0.14, request_prompts(draw, count)),
        (0.06, program_prompts(draw, count)),
        (0.04, science_prompts(draw, count)),
        (0.14, foreign_prompts(draw, count)),
    ]
    prompts = []
    ends = [round(share * count) for share in accumulate(share for share, _ in kinds)]
    for (_, found), first, end in zip(kinds, [0, *ends], ends, strict=False):
        different = sorted(set(found))
        draw.shuffle(different)
        prompts += different[: end - first]
    draw.shuffle(prompts)
    return prompts


def write_prompts(prompts: list[str], file: Path) -> None:
    """As JSON lines."""
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts]
    file.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.count < 1:
        parser.error(f"argument --count: it is {args.count}; give the number of prompts, at least 1")
    prompts = all_prompts(args.count, args.seed)
    write_prompts(prompts, args.output)
    print(f"{len(prompts)} prompts in {args.output}")


if __name__ == "__main__":
    main()
