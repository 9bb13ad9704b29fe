"""Pages name only what exists: files, functions, settings, commands."""

import ast
import contextlib
import dataclasses
import inspect
import io
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import get_origin

import pytest
import yaml
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.experimental.sdpo import SDPOConfig

from grpo_mp.cli.main import COMMANDS, main
from grpo_mp.config import Settings, SftSettings, check_settings, load_settings
from grpo_mp.utils.section import Section, section_type
from tests.minimal_settings import MINIMAL_SETTINGS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "grpo_mp/**/*.md", "launch/*.md", "configs/*.md", "tests/*.md", ".github/*.md")
    for page in ROOT.glob(pattern)
)
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def defined_names(file: Path) -> set[str]:
    """Names of classes and functions of a module, methods as Class.method."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {node.name, *(f"{node.name}.{method}" for method in methods)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [
        target for target in targets if not target.startswith("http") and not (page.parent / target.strip()).exists()
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_and_functions_exist(page: Path) -> None:
    """A file may be given from the repository, from grpo_mp, or from the page's folder; a name behind it is in it."""
    missing = []
    for path, name in re.findall(r"`([\w/]+/\w+\.(?:py|yaml|sh|txt))`(?:\s+`([A-Za-z_.]+)`)?", page.read_text()):
        files = [folder / path for folder in (ROOT, ROOT / "grpo_mp", page.parent) if (folder / path).exists()]
        if not files and not re.search("[A-Z]", path):  # capitals are placeholders
            missing.append(path)
        elif name and files and files[0].suffix == ".py" and name not in defined_names(files[0]):
            missing.append(f"{path} {name}")
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_settings_exist(page: Path) -> None:
    sections = "|".join(Settings.model_fields | SftSettings.model_fields)
    text = page.read_text()
    if page.name.upper() == "COMING_FROM.MD":  # the other columns are theirs
        text = "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    names = re.findall(rf"`((?:{sections})(?:\.\w+)+)[=`: ]", text)
    assert not [name for name in names if not is_setting(name)]


def is_setting(name: str) -> bool:
    """Whether a dotted name is a setting of either kind of file."""
    return is_setting_of(Settings, name) or is_setting_of(SftSettings, name)


def is_setting_of(root: type[Section], name: str) -> bool:
    """Whether a dotted name is there; dictionaries take any key, those of sections only a section's."""
    section: type[Section] | None = root
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if section is None or part not in section.model_fields:
            return False
        annotation = section.model_fields[part].annotation
        section = section_type(annotation)
        if get_origin(annotation) is dict:
            return section is None or len(parts) <= depth + 2 or parts[depth + 2] in section.model_fields
    return True


@pytest.mark.parametrize("page", ["README.md", "grpo_mp/docs/first_run.md", "configs/COMING_FROM.md"])
def test_a_settings_file_of_a_page_is_complete(page: str, tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    load_settings(file)


def test_settings_of_the_page_on_training_are_valid() -> None:
    text = (ROOT / "grpo_mp/docs/training.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        check_settings(MINIMAL_SETTINGS | yaml.safe_load(block), "grpo_mp/docs/training.md")


def test_trl_settings_on_the_page_for_its_users_exist() -> None:
    rows = [line.split("|") for line in (ROOT / "configs/COMING_FROM.md").read_text().splitlines()]
    named = {name for row in rows if len(row) == 6 for name in re.findall(r"`(\w+)`", row[2])}
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    fields |= {field.name for field in dataclasses.fields(SDPOConfig)}
    columns = {"prompt", "privileged_context"}
    arguments = columns | {*inspect.signature(GRPOTrainer).parameters}
    assert len(named) > 40
    assert not named - fields - arguments


def test_trl_settings_of_supervised_fine_tuning_exist() -> None:
    _, table = (ROOT / "configs/COMING_FROM.md").read_text().split("## Supervised fine-tuning\n")
    rows = [line.split("|") for line in table.splitlines()]
    named = {name for row in rows if len(row) == 4 for name in re.findall(r"`(\w+)`", row[2])}
    fields = {field.name for field in dataclasses.fields(SFTConfig)}
    columns = {"messages", "prompt", "completion", "tools", *inspect.signature(SFTTrainer).parameters}
    assert len(named) > 20
    assert not named - fields - columns


def commands(page: Path) -> Iterator[list[str]]:
    """Commands of a page by word: the lines of its shell blocks, and those within a sentence."""
    text = page.read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    sentences = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`((?:grpo-mp|torchrun|sbatch|bash|python3? -m) [^`]+)`", sentences)
    yield from filter(None, (shlex.split(line, comments=True) for line in lines))


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What each command of grpo-mp says of itself."""
    texts = {}
    for command in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
            main([command, "--help"])
        texts[command] = shown.getvalue()
    return texts


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_exist_with_their_options_and_settings(page: Path, helps: dict[str, str]) -> None:
    """That README's commands do what they should is seen by .ci/run, which runs them."""
    for words in commands(page):
        options = [word for word in words if word.startswith("--")]
        overrides = [word.partition("=")[0] for word in words if re.match(r"[a-z_]+(\.\w+)+=", word)]
        assert not [name for name in overrides if not is_setting(name)], words
        if words[0] == "grpo-mp":
            help_text = helps[words[1]] if len(words) > 1 else ""
            assert not [option for option in options if option.partition("=")[0] not in help_text], words
        elif "-m" in words and words[words.index("-m") + 1].startswith(("grpo_mp", "tests", "tools")):
            assert find_spec(words[words.index("-m") + 1]), words
        elif words[0] in ("bash", "sbatch"):
            script = next(word for word in words[1:] if not word.startswith("--"))
            assert (ROOT / script).exists() or re.search("[A-Z]", script), words
