"""Needles in a haystack: eight tasks that differ in what is hidden, where, and how much of it is asked for."""

from __future__ import annotations

from ctxext.evaluation.ruler._needles import InEssay, InNeedles, InNoise


class Single1(InNoise):
    """A number in repeated noise: a passkey."""

    name = "niah_single_1"


class Single2(InEssay):
    """A number in prose."""

    name = "niah_single_2"


class Single3(InEssay):
    """A UUID in prose: 36 characters to repeat without a mistake."""

    name = "niah_single_3"
    kind_of_value = "uuids"


class MultiKey1(InEssay):
    """Four keys in prose, one asked for."""

    name = "niah_multikey_1"
    keys = 4


class MultiKey2(InNeedles):
    """Nothing but needles, one asked for."""

    name = "niah_multikey_2"


class MultiKey3(InNeedles):
    """Nothing but needles whose keys and values are UUIDs, one asked for."""

    name = "niah_multikey_3"
    kind_of_key = "uuids"
    kind_of_value = "uuids"


class MultiValue(InEssay):
    """One key with four values, all asked for."""

    name = "niah_multivalue"
    values = 4


class MultiQuery(InEssay):
    """Four keys with a value each, all asked for."""

    name = "niah_multiquery"
    queries = 4
