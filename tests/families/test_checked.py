"""The measured table of families is of today's cases, and the page shows it."""

from pathlib import Path

from family_cases import CASES

from dolmen.families import families
from dolmen.families.checked import cases_of, layouts, measured_cases

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "families.md").read_text()


def test_every_case_was_measured():
    """Another one: python -m benchmarks.families CASE."""
    assert {row.case for row in measured_cases()} == set(CASES)
    assert {row.model_type for row in measured_cases()} == set(families())


def test_what_was_measured_is_what_the_tests_hold():
    for row in measured_cases():
        assert row.logits < 1e-4 and row.gradients < 2e-5 and row.gradients_fp64 < 1e-12, row.case
        assert row.texts in ("3 of 3", "none"), row.case
        for layout, found in row.layouts.items():
            refusal = CASES[row.case].refused.get(layout)
            assert refusal in found if isinstance(found, str) else found < 1e-12, row.case


def test_the_page_has_every_row():
    for row in measured_cases():
        assert f"| {families()[row.model_type].title} (`{row.model_type}`) | {row.case} |" in PAGE


def test_what_the_short_table_says():
    assert layouts(cases_of("llama")) == {"tp2 sp": "", "pp2 acc4": "", "cp2": ""}
    assert families()["llama"].title == "Llama 1 to 3.3, Code Llama"
