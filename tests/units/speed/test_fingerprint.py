"""Timings of different hardware, versions or precision are never held beside each other."""

from __future__ import annotations

from ampcheck.records.speed import KEYED, differences, hardware_key, key_of
from ampcheck.speed.paired import fingerprint


def test_this_process_has_a_fingerprint_of_hardware_and_versions() -> None:
    known = fingerprint()
    assert set(known) <= set(KEYED)
    assert {"device", "threads", "torch", "python"} <= set(known)
    assert differences(known, dict(known)) == []


def test_each_part_of_the_fingerprint_changes_the_key() -> None:
    known = dict.fromkeys(KEYED, "same")
    keys = {key_of({**known, name: "other"}) for name in KEYED} | {key_of(known), key_of(known, "bfloat16")}
    assert len(keys) == len(KEYED) + 2


def test_a_key_of_hardware_alone_outlives_a_release_of_torch() -> None:
    known = dict.fromkeys(KEYED, "same")
    assert hardware_key({**known, "torch": "2.14", "platform": "same-6.2"}) == hardware_key(known)
    assert hardware_key({**known, "device": "cpu (other)"}) != hardware_key(known)


def test_differences_are_told_by_name_with_both_values() -> None:
    assert differences({"torch": "2.13"}, {"torch": "2.14"}) == ["torch: 2.13 and 2.14"]
    assert differences({"threads": 2}, {}) == ["threads: 2 and unknown"]
