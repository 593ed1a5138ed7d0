"""The shared code of benchmarks: tables, and the order in which ways and processes take turns."""

from __future__ import annotations

import multiprocessing

from benchmarks.running import format_markdown, format_table, run_rounds, take_turns


def test_tables_are_formatted_as_text_with_wrapped_headings_and_as_markdown() -> None:
    text = format_table(
        ["", "CPU s per 1,000 images", "MB/s"], [["gpuload", "1.14", "7"], ["DALI", "10.5", "12"]], "a title"
    )
    assert text.splitlines() == [
        "a title",
        "         CPU s per  MB/s",
        "             1,000",
        "            images",
        "───────  ─────────  ────",
        "gpuload       1.14     7",
        "DALI          10.5    12",
    ]
    assert format_markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_run_rounds_rotates_the_ways_and_drops_failed_ways() -> None:
    calls: list[str] = []
    failed: dict[str, dict[str, str]] = {}

    def run(way: str) -> dict[str, str]:
        calls.append(way)
        return {"error": "broken"} if way == "b" else {"way": way}

    rounds = run_rounds("abc", 2, run, failed)
    assert calls == ["a", "b", "c", "c", "a"]
    assert rounds == [{"a": {"way": "a"}, "c": {"way": "c"}}, {"c": {"way": "c"}, "a": {"way": "a"}}]
    assert failed == {"b": {"error": "broken"}}


def test_take_turns_gives_each_number_to_one_process() -> None:
    counter = multiprocessing.get_context("fork").Value("q", 0)
    slow, fast = take_turns(7, counter, 2), take_turns(7, counter, 2)
    assert [next(slow), next(fast), *fast, *slow] == [0, 2, 3, 4, 5, 6, 1]
    assert list(take_turns(7, counter, 2)) == []
