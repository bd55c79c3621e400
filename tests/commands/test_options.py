"""Settings of any dataclass: as options, in files, as help and as YAML, each refused by its name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml

from tawpipe.errors import UserError
from tawpipe.options.command import Options
from tawpipe.options.files import place_in, read_mapping
from tawpipe.options.parser import CommandParser, first_sentence
from tawpipe.options.settings import Group, Leaf, all_of, tree, with_choices


@dataclass(frozen=True)
class Oven:
    """How hot it is.

    Args:
        degrees: of the air.
        mode: where heat comes from.
    """

    degrees: float = field(default=180.0, metadata={"minimum": 0, "below": 300})
    mode: Literal["top", "bottom"] = "top"


@dataclass(frozen=True)
class Recipe:
    """A cake.

    Args:
        eggs: how many. No more than there are.
        vegan: without them.
        sizes: of tins.
        name: on the box.
    """

    eggs: int = field(default=3, metadata={"minimum": 0})
    vegan: bool = False
    sizes: list[int] = field(default_factory=lambda: [20, 26])
    name: str | None = None
    oven: Oven = Oven()


def options(**more) -> Options[Recipe]:
    return Options(Recipe, prog="bake", description="Bakes.", **more)


def test_every_field_becomes_a_setting_with_option_and_help() -> None:
    members = list(all_of(tree(Recipe)))
    leaves = {one.key: one for one in members if isinstance(one, Leaf)}
    assert list(leaves) == ["eggs", "vegan", "sizes", "name", "oven.degrees", "oven.mode"]
    assert leaves["oven.degrees"].option == "--oven.degrees" and leaves["oven.degrees"].help == "of the air."
    assert [one.help for one in members if isinstance(one, Group)] == ["How hot it is."]


@pytest.mark.parametrize(
    ("key", "said", "value"),
    [
        ("eggs", "4", 4),
        ("vegan", "true", True),
        ("sizes", ["18", 20], [18, 20]),
        ("sizes", 18, [18]),
        ("name", "null", None),
        ("name", "null and void", "null and void"),
        ("oven.degrees", "1e2", 100.0),
        ("oven.mode", "bottom", "bottom"),
    ],
)
def test_setting_values_are_read_and_written_back(key: str, said: object, value: object) -> None:
    leaf = next(one for one in all_of(tree(Recipe)) if isinstance(one, Leaf) and one.key == key)
    assert leaf.read(said) == value
    assert leaf.read(yaml.safe_load(leaf.text(value))) == value


@pytest.mark.parametrize(
    ("key", "said"), [("eggs", "many"), ("eggs", "2.5"), ("vegan", "maybe"), ("sizes", ["x"]), ("oven.mode", "side")]
)
def test_values_of_another_type_are_refused_by_name(key: str, said: object) -> None:
    leaf = next(one for one in all_of(tree(Recipe)) if isinstance(one, Leaf) and one.key == key)
    with pytest.raises(UserError, match=f"^--{key}: got "):
        leaf.read(said)


@pytest.mark.parametrize("value", [-0.1, 300.0, float("inf"), float("nan")])
def test_numbers_out_of_bounds_are_refused(value: float) -> None:
    leaf = next(one for one in all_of(tree(Recipe)) if isinstance(one, Leaf) and one.key == "oven.degrees")
    leaf.check(0.0)
    leaf.check(299.9)
    with pytest.raises(UserError, match=r"^--oven\.degrees: got "):
        leaf.check(value)


def test_choices_are_listed_in_help_and_in_expected_values() -> None:
    (name, *_) = [
        one for one in all_of(with_choices(tree(Recipe), {"name": {"A": "apples", "B": "berries"}}))
        if isinstance(one, Leaf) and one.key == "name"
    ]  # fmt: skip
    assert name.expected == "one of A, B" and name.help == "on the box. A: apples; B: berries."


# files


def test_command_line_overrides_files_and_later_files_override_earlier(tmp_path: Path) -> None:
    one, other = tmp_path / "one.yaml", tmp_path / "other.yaml"
    one.write_text("eggs: 5\noven:\n  degrees: 200\n  mode: bottom\n")
    other.write_text("oven:\n  degrees: 220\n")
    words = [f"--config={one}", "--config", str(other), "--eggs", "7", "--sizes", "18", "24", "--vegan"]
    made = options().parse(words)
    assert made == Recipe(7, True, [18, 24], None, Oven(220.0, "bottom"))


def test_printed_settings_read_back_equal(tmp_path: Path, capsys) -> None:
    made = Recipe(0, True, [], "a: b # no comment", Oven(12.5, "bottom"))
    file = tmp_path / "all.yaml"
    file.write_text(options().to_yaml(made))
    assert options().parse(["--config", str(file)]) == made
    with pytest.raises(SystemExit) as ended:
        options().parse(["--config", str(file), "--print-config"])
    assert ended.value.code == 0 and capsys.readouterr().out == file.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--egs", "3"], "command line: got '--egs'; no such option; did you mean --eggs"),
        (["--eggs"], "--eggs: got 'nothing'; a whole number"),
        (["flour"], "command line: got 'flour'; options start with --"),
        (["--oven.mode", "side"], "--oven.mode: got 'side'; "),
    ],
)
def test_wrong_command_line_words_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        options().parse(words)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eggs: many\n", "--eggs in {file}, line 1: got 'many'"),
        ("eggs: 1\noven:\n  degree: 2\n", "--config {file}, line 3: got 'oven.degree'; no such key"),
        ("\noven: hot\n", "oven in {file}, line 2: got 'hot'; a mapping of settings"),
        ("- 1\n", "--config: got '{file}'; a mapping of settings to values, not list"),
        (
            "eggs: 1\noven:\n  degrees: 5\noven:\n  mode: top\n",
            "--config: got '{file}'; plain YAML without tags: line 4: 'oven' stands in line 2 already",
        ),
        ("oven: {degrees: 5, degrees: 6}\n", "--config: got '{file}'; plain YAML without tags: line 1: "),
        ("a: !!python/object:os.system x\n", "--config: got '{file}'; plain YAML without tags"),
    ],
)
def test_error_in_a_config_file_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        options().parse(["--config", str(file)])
    assert str(refused.value).startswith(message.format(file=file))


def test_late_refusal_names_the_file_unless_set_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "cake.yaml"
    file.write_text("# a cake\noven:\n  degrees: 500\n")
    error = UserError("--oven.degrees", 500.0, "below 300")
    words = ["--config", str(file)]
    assert options().located(error, words).setting == f"--oven.degrees in {file}, line 3"
    assert options().located(error, [*words, "--oven.degrees", "500"]) is error
    assert options().located(UserError("--sugar", 1, "none"), words).setting == "--sugar"


def test_yaml_key_is_located_by_its_last_line(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("a: 1\nb:\n  c: 2\na: 3\n")
    assert place_in(str(file), ["b", "c"]) == f"{file}, line 3"
    assert place_in(str(file), ["a"]) == f"{file}, line 4"  # the one that counts
    assert place_in(str(file), ["b", "d"]) == ""
    file.write_text("")
    assert read_mapping(str(file)) == {}
    with pytest.raises(UserError, match=r"--config: got .*a YAML file that can be read: no such file"):
        read_mapping(str(tmp_path / "missing.yaml"))


# the parser of other commands


def parser() -> CommandParser:
    made = CommandParser(prog="bake", leading={"--eggs": "4"}, elsewhere={"ovums": "{eggs}"})
    made.add_argument("--eggs", type=int, help="How many. No more than there are.")
    made.add_argument("--oven-degrees", type=float, help="Heat.")
    commands = made.add_subparsers()
    commands.add_parser("cookies", prog="bake cookies").add_argument("--raisins", action="store_true")
    return made


def test_short_help_shows_leading_options_and_whole_help_shows_all() -> None:
    short, whole = parser().format_help(), parser().whole_help()
    assert "--eggs 4" in short and "How many" in short and "No more" not in short
    assert "--oven-degrees" not in short and "bake --help-all shows all 4 options." in short
    assert "--oven-degrees" in whole and "No more than there are" in whole


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--egs=1"], "did you mean --eggs"),
        (["--ovums", "1"], "in tawpipe it is --eggs"),
        (["cookies", "--raisin-bran"], "--raisins"),
        (["cookies", "--zzz"], "bake cookies --help lists all options"),
    ],
)
def test_mistyped_option_is_refused_before_other_errors(words: list[str], hint: str) -> None:
    with pytest.raises(UserError, match="no such option; ") as refused:
        parser().parse_args([*words, "--eggs", "none"])
    assert hint in str(refused.value)


def test_first_sentence_ends_at_a_full_stop_not_at_an_abbreviation() -> None:
    assert first_sentence("One, e.g. two. Three.") == "One, e.g"
    assert first_sentence("a.b c. D") == "a.b c" and first_sentence("") == ""
