"""Policies as TOML and JSON."""

import errno
import json
import os
import pickle
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.errors import FileMissingError, FileReadError, PolicyError
from coldsnap.policy import IO, Policy, leaves
from coldsnap.policy.text import LIMIT_BYTES
from strategies import policies, wrong_values


def problems_of(make, *arguments):
    with pytest.raises(PolicyError) as caught:
        make(*arguments)
    return dict(caught.value.problems)


FORMATS = pytest.mark.parametrize(
    ("write", "read"), [(Policy.to_toml, Policy.from_toml), (Policy.to_json, Policy.from_json)], ids=["toml", "json"]
)


@FORMATS
@given(policy=policies(), complete=st.booleans())
def test_text_to_policy_to_text_is_the_identity(write, read, policy, complete):
    text = write(policy, complete=complete)
    again = read(text)

    assert again == policy
    assert write(again, complete=complete) == text
    assert read(text.encode()) == policy


@FORMATS
@given(policy=policies())
def test_text_keeps_what_was_set_and_nothing_else(write, read, policy):
    assert read(write(policy)).explicit == policy.explicit


@given(policies())
def test_the_two_formats_say_the_same(policy):
    assert tomllib.loads(policy.to_toml(complete=True)) == json.loads(policy.to_json(complete=True))
    assert Policy.from_data(policy.to_data()) == policy


def test_a_complete_text_has_every_leaf():
    text = Policy().to_toml(complete=True)

    assert all(f"\n{row.name} = " in f"\n{text}" or f"# {row.name} is unset" in text for row in leaves())


def test_an_empty_text_is_the_default_policy():
    assert (Policy.from_toml(""), Policy.from_json("{}")) == (Policy(), Policy())
    assert (Policy().to_toml(), Policy().to_json()) == ("", "{}\n")


def test_every_problem_of_a_text_is_named_at_once_with_its_path():
    text = """
    profile = "qualificaton"
    verify = "full"

    [weights]
    mode = "nativ"
    native = { repository = "owner/name", revision = "main", files-by-worker = {} }

    [weights.recovery]
    chunk_bytes = "4096"
    queue_depth = 4.0
    distributed = "no"
    enabled = 1
    verify_bytes = true

    [process]
    discard = "kv_cache"
    cache_seed = false
    cache_paths = ["~/.cache/vllm"]
    shape_calibration = 2026-01-01

    [io]
    hydration-backend = "gds"
    hydration_backend = "gds"
    reuse_blob = []

    [graph]
    asynchronous = true
    """

    assert problems_of(Policy.from_toml, text) == {
        "$.profile": (
            'expected one of default, qualification; found text "qualificaton"; did you mean "qualification"?'
        ),
        "$.verify": "is no key of a policy; its keys are profile, compatibility, weights, process, graphs, io",
        "$.weights.mode": (
            'expected one of auto, native, recovery, cache-only-auto, image; found text "nativ"; did you mean "native"?'
        ),
        "$.weights.native.revision": 'expected a commit of 40 lowercase hexadecimal digits; found text "main"',
        "$.weights.native.files-by-worker": ('is no key of weights.native; did you mean "files_by_worker"?'),
        "$.weights.recovery.chunk_bytes": ('expected an integer (multiple of 4096, at least 4096); found text "4096"'),
        "$.weights.recovery.queue_depth": "expected an integer (1 to 64); found float 4.0",
        "$.weights.recovery.distributed": 'expected true or false; found text "no"',
        "$.weights.recovery.enabled": "expected true or false; found integer 1",
        "$.weights.recovery.verify_bytes": "expected an integer (0 to 4096); found boolean true",
        "$.process.discard": 'expected a list (any of ["kv_cache"], or []); found text "kv_cache"',
        "$.process.cache_paths": (
            'expected [] because process.cache_seed is false; found list ["~/.cache/vllm"]; drop them, or seed'
        ),
        "$.process.shape_calibration": ("expected one of auto, enabled, disabled; found datetime.date(2026, 1, 1)"),
        "$.io.hydration-backend": ('is no key of io; did you mean "hydration_backend"?'),
        "$.io.reuse_blob": "expected true or false; found list []",
        "$.io.verify_mode": (
            'expected "preverified" because io.hydration_backend is "gds"; found "inline"; set it, or take '
            "another backend"
        ),
        "$.graph": ('is no key of a policy; did you mean "graphs"?'),
    }


@given(st.sampled_from(leaves()), wrong_values)
def test_a_value_of_any_type_is_taken_as_it_stands_or_refused_with_its_path(row, value):
    *tables, name = row.path.split(".")
    data = {name: value}
    for table in reversed(tables):
        data = {table: data}
    try:
        policy = Policy.from_json(json.dumps(data))
    except PolicyError as error:
        # A rule between leaves may name the other leaf, which is missing.
        assert error.problems
        assert all(path.startswith("$.") for path, _ in error.problems)
    else:
        assert json.dumps(policy.to_data(), sort_keys=True) == json.dumps(data, sort_keys=True)


@given(st.recursive(wrong_values, lambda inner: st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8))
def test_no_data_makes_anything_but_a_policy_or_a_policy_error(data):
    try:
        Policy.from_data(data)
    except PolicyError as error:
        assert error.problems


@given(st.binary(max_size=200))
def test_no_bytes_make_anything_but_a_policy_or_a_policy_error(raw):
    for read in (Policy.from_toml, Policy.from_json):
        try:
            read(raw)
        except PolicyError as error:
            assert error.problems


def test_a_key_given_twice_is_refused():
    text = '{"io": {"queue_depth": 4, "queue_depth": 8, "reuse_blob": 1}, "io": {"queue": 2}}'

    assert problems_of(Policy.from_json, text) == {
        "$.io.queue_depth": "expected once; found again; keep one of them",
        "$.io": "expected once; found again; keep one of them",
        "$.io.queue": ('is no key of io; did you mean "queue_depth"?'),
    }
    assert "overwrite" in problems_of(Policy.from_toml, "[io]\nqueue_depth = 4\nqueue_depth = 8\n")["$"]


@pytest.mark.parametrize(
    "text",
    [
        '{"io": {}} {"io": {}}',
        "{} x",
        "[]",
        "null",
        "4",
        "",
        "{",
        '{"io": {"queue_depth": NaN}}',
        '{"io": {"queue_depth": ' + "9" * 5000 + "}}",
        "[" * 100_000,
        '{"io":' * 100_000,
        '{"io": {"native_library": "/\\ud800"}}',
        '{"weights": {"native": {"repository": null}}}',
    ],
)
def test_json_that_is_no_policy_is_refused(text):
    assert problems_of(Policy.from_json, text)


@pytest.mark.parametrize(
    "text",
    [
        "io = 4",
        "[io",
        "[[io]]\nqueue_depth = 4",
        "io.queue_depth = nan",
        "io.queue_depth = 0x_1",
        "io.queue_depth = 1e1",
        "a = " + "[" * 100_000,
        "\ufeff[io]",
        "io.queue_depth = 4 5",
        "io.queue_depth = " + "9" * 5000,
    ],
)
def test_toml_that_is_no_policy_is_refused(text):
    assert problems_of(Policy.from_toml, text)


def test_an_error_can_be_printed_whatever_the_keys_and_values_are():
    text = json.dumps({"io\ud800\n": 1, "x" * 1000: 1, "weights": {"mode": "\ud800"}, "": 1})

    problems = problems_of(Policy.from_json, text)

    assert list(problems) == ['$."io\\ud800\\n"', '$."' + "x" * 59 + "…", "$.weights.mode", '$.""']
    assert str(PolicyError(tuple(problems.items()))).encode()


def test_a_text_full_of_unknown_keys_is_refused_key_by_key():
    text = json.dumps({f"key{number}": 1 for number in range(50_000)})

    assert len(problems_of(Policy.from_json, text)) == 50_000


def test_a_long_wrong_value_is_shown_in_part():
    message = problems_of(Policy.from_json, json.dumps({"weights": {"mode": "x" * 100_000}}))["$.weights.mode"]

    assert len(message) < 250


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_saved_policy_is_loaded_as_it_was(tmp_path, suffix):
    policy = Policy(io=IO(native_library="/opt/größe 'x' \"y\"/lib.so"))
    policy.save(tmp_path / f"policy.{suffix}")

    again = Policy.load(tmp_path / f"policy.{suffix}")

    assert (again, again.explicit) == (policy, policy.explicit)


def test_a_file_is_named_in_its_error(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("[io]\nqueue = 4\n")

    with pytest.raises(PolicyError, match=r"policy\.toml has 1 problem:\n  - \$\.io\.queue: is no key of io"):
        Policy.load(path)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "policy.json"
    path.write_bytes(b'{"profile": "\xff"}')

    assert problems_of(Policy.load, path) == {"$": "expected UTF-8; found byte 0xff at offset 13"}


def test_a_huge_file_is_refused_without_being_read(tmp_path):
    path = tmp_path / "policy.json"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 2**40)

    assert problems_of(Policy.load, path) == {"$": f"expected at most {LIMIT_BYTES} bytes; found more"}
    assert problems_of(Policy.from_json, " " * (LIMIT_BYTES + 1))
    assert Policy.from_json("{}" + " " * (LIMIT_BYTES - 2)) == Policy()


def test_another_suffix_is_refused(tmp_path):
    assert problems_of(Policy.load, tmp_path / "policy.yaml")
    assert problems_of(Policy().save, tmp_path / "policy")


def test_a_missing_file_is_named_and_is_the_error_of_the_system_too(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no policy at .*policy\.toml; correct the path") as caught:
        Policy.load(tmp_path / "policy.toml")
    assert isinstance(caught.value, FileMissingError)
    assert caught.value.path == str(tmp_path / "policy.toml")
    assert caught.value.errno == errno.ENOENT
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.path, again.errno) == (str(caught.value), caught.value.path, errno.ENOENT)


def test_what_cannot_be_read_as_a_file_is_named(tmp_path):
    (tmp_path / "policy.toml").mkdir()
    with pytest.raises(FileReadError, match=r"the policy .*policy\.toml cannot be read: Is a directory"):
        Policy.load(tmp_path / "policy.toml")


def test_a_profile_is_named_in_the_text_or_at_loading(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text('profile = "qualification"\n')

    assert Policy.load(path).profile == "qualification"
    assert Policy.load(path, profile="default").profile == "default"
    assert problems_of(lambda: Policy.load(path, profile="fast"))
