"""Words of our own and the form of docstrings: each rule is red on a planted file."""

from pathlib import Path

from tests.house.planted import plant
from tools.house.words import (
    EVERYWHERE,
    OURS,
    OURS_IN_NAMES,
    docstrings,
    glossary,
    names,
    none_lists,
    openings,
    spaced,
    wide_prose,
)

WIDE = "    " + "word " * 20 + "end."
CODE = f'''"""What lanes are told, beside `riders`; who asks."""


class HeldRequests:
    """Requests. `x`: a number, None: no number."""

    def turn(self, most_rows, roll_call=None):
        """Return a row.

{WIDE}
        """
        held = "told riders"  # departures
        return held, MOST_ROWS, self.overturn

    def plain(self):
        """whose rows are given."""
'''


def test_names_are_split_into_words() -> None:
    assert spaced("max_lora_rank") == spaced("MaxLoraRank") == spaced("MAX_LORA_RANK") == "max lora rank"


def test_a_name_counts_once_however_often_it_is_used(tmp_path: Path) -> None:
    tree = plant(tmp_path, {"engine/a.py": CODE, "engine/b.py": CODE, "tests/c.py": "told_c = lanes = 1\n"})
    assert names(tree) == {"all names": 5, "held": 2, "turn": 1, "most": 1, "roll_call": 1}


def test_words_of_docstrings_are_counted_apart_from_code_and_ordinary_english(tmp_path: Path) -> None:
    found = docstrings(plant(tmp_path, {"engine/a.py": CODE}))
    assert found == {"all docstrings": 5, "lanes": 1, "told": 1, "beside": 1, "who": 1, "asks": 1}


def test_a_docstring_begins_with_a_sentence_or_a_thing(tmp_path: Path) -> None:
    assert openings(plant(tmp_path, {"engine/a.py": CODE, "router/a.py": '"""Offers."""\n'})) == {
        "engine": 2,
        "router": 0,
    }


def test_prose_is_at_most_a_hundred_columns_wide(tmp_path: Path) -> None:
    long = f'x = "{"long " * 30}"\n'
    assert wide_prose(plant(tmp_path, {"engine/a.py": CODE, "router/a.py": long})) == {"engine": 1, "router": 0}


def test_none_is_explained_by_configuration_alone(tmp_path: Path) -> None:
    tree = plant(tmp_path, {"engine/a.py": CODE, "engine/config.py": CODE, "router/flags.py": CODE})
    assert none_lists(tree) == {"engine": 1, "router": 0}


def test_terms_of_the_glossary_are_counted(tmp_path: Path) -> None:
    page = "# Glossary\n\n| word | meaning |\n|---|---|\n| a | b |\n| c | d |\n\n| word | meaning |\n|---|---|\n| e | f |\n"
    assert glossary(plant(tmp_path, {"docs/glossary.md": page})) == {"docs/glossary.md": 3}


def test_a_word_stands_in_one_table() -> None:
    assert len({**EVERYWHERE, **OURS, **OURS_IN_NAMES}) == len(EVERYWHERE) + len(OURS) + len(OURS_IN_NAMES)
