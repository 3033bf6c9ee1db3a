"""Every public name has a docstring, and docs/api.md says what they say."""

from __future__ import annotations

from dataclasses import is_dataclass

import pytest

import llamahybrid
from tests.lab.api_page import FOR_USERS, PAGE, described_fields, doc, is_property, markdown, members, page
from tests.lab.api_page import public_classes as classes

CLASSES = pytest.mark.parametrize("owner", classes(), ids=lambda owner: owner.__name__)


def test_the_committed_page_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python -m tests.lab.api_page"


@CLASSES
def test_a_public_class_and_all_it_offers_have_docstrings_of_their_own(owner: type) -> None:
    assert "__doc__" in vars(owner)
    assert vars(owner)["__doc__"]
    for name, member in members(owner).items():
        told = member.fget if is_property(member) and isinstance(member, property) else member
        assert told.__doc__, f"{owner.__name__}.{name} has no docstring"
        if name in FOR_USERS.get(owner, members(owner)):
            assert doc(owner, name)  # what it refers to is there, too
    if is_dataclass(owner):
        untold = [name for name, text in described_fields(owner).items() if not text]
        assert not untold, f"no docstring below {owner.__name__}'s {untold}"


def test_all_that_is_exported_is_on_the_page() -> None:
    text = page()
    for name in llamahybrid.__all__:
        assert name == "__version__" or f"## {name}\n" in text or f"**{name}**" in text


def test_what_is_for_users_exists() -> None:
    for owner, names in FOR_USERS.items():
        assert set(names) <= members(owner).keys()


def test_a_reference_is_replaced_by_what_it_means() -> None:
    """`PromptCache.forget` says "See `…forget`", and what it does beyond that."""
    text = doc(llamahybrid.PromptCache, "forget")
    assert "See `" not in text
    assert "bytes freed" in text


def test_explained_names_become_a_list_and_examples_code() -> None:
    text = "Words.\n\n`one`: first,\nmore. `two`: second.\n\n>>> 1\n1"
    assert (
        markdown(text) == "Words.\n\n- `one`: first,\nmore.\n- `two`: second.\n\n```python\n>>> 1\n1\n```\n"
    )
