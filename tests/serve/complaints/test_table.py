"""Complaints of other servers' users, and the tests against each of them here: every test that is named exists."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]


class Complaint(NamedTuple):
    """A complaint, and the tests against it: files in `tests/serve`, or from the root."""

    what: str
    tests: tuple[str, ...]
    #: what no test shows, and why
    untested: str = ""


COMPLAINTS: dict[int, Complaint] = {
    1: Complaint(
        "Streamed tool calls are cut, doubled, or lack their first part.",
        (
            "stream/test_syntaxes.py::test_calls_are_read_however_they_are_cut",
            "stream/test_syntaxes.py::test_broken_calls_are_the_same_however_they_are_cut",
            "test_channels.py::test_every_cut_gives_the_same_answer",
            "test_channels.py::test_a_call_that_is_asked_for_is_made",
            "test_openai_client.py::test_the_bundled_model_takes_tools",
        ),
    ),
    2: Complaint(
        "`strict` or a schema is accepted and not applied.",
        (
            "complaints/test_over_http.py::test_a_strict_schema_holds_at_the_highest_temperature",
            "stream/test_syntaxes.py::test_a_schema_that_the_syntax_cannot_follow_is_refused",
            "tests/filters/test_json_schemas.py::test_complete_outputs_are_valid",
            "tests/filters/test_json_schema_suite.py::test_no_case_is_worse_than_the_baseline",
        ),
    ),
    3: Complaint(
        "Reasoning and tools exclude each other, markers leak, a budget cuts a call.",
        (
            "test_channels.py::test_a_format_begins_after_the_reasoning",
            "test_channels.py::test_reasoning_that_the_prompt_has_opened",
            "test_format_with_tools.py::test_the_format_begins_after_the_reasoning",
            "test_reasoning_budget.py::test_it_has_an_opinion_at_the_limit_alone",
            "test_reasoning_budget.py::test_a_budget_and_a_schema",
        ),
    ),
    4: Complaint(
        "The field with the reasoning changes its name.",
        (
            "complaints/test_over_http.py::test_the_field_of_the_reasoning_has_the_configured_name",
            "test_other_fields.py::test_answers_without_a_content_are_taken_back",
        ),
    ),
    5: Complaint(
        "The client has left, and the generation goes on.",
        (
            "test_openai_client.py::test_leaving_in_the_middle_frees_everything",
            "test_openai_client.py::test_a_whole_answer_whose_client_leaves_is_cancelled",
            "ops/test_chaos.py::test_a_cancelled_request_frees_its_pages_within_two_steps",
            "test_images.py::test_decoding_ends_at_the_deadline_and_when_the_client_leaves",
            "test_soak.py::test_requests_and_disconnects_leave_nothing",
            "tests/install/ray_cluster.py::test_clients_that_leave_hold_nothing",
        ),
    ),
    6: Complaint(
        "Health says yes while nothing moves, or no while the engine is busy.",
        (
            "ops/test_watch.py::test_busy_is_not_stalled_and_stalled_is_ended",
            "ops/test_watch.py::test_an_idle_engine_that_writes_no_more_is_stalled",
            "ops/test_chaos.py::test_a_step_that_never_returns_is_seen_on_the_status_page",
            "ops/test_operation.py::test_a_stopped_engine_is_logged_ended_and_started_again",
            "test_probe.py::test_an_engine_that_fails_or_writes_something_else",
            "test_probe.py::test_a_hanging_engine",
            "test_probe.py::test_a_long_queue_is_no_failure",
        ),
    ),
    7: Complaint(
        "A tokenizer, a template, an image or a huge body blocks all streams.",
        (
            "complaints/test_over_http.py::test_a_long_text_is_encoded_outside_the_loop",
            "test_http.py::test_a_large_body_is_read_outside_the_loop",
            "tests/generate/test_text_tokenizer.py::test_a_slow_template_does_not_stop_the_others",
            "test_images.py::test_more_requests_than_may_wait_for_a_decoder_are_refused",
            "ops/test_watch.py::test_a_long_block_of_the_loop_counts_for_every_timer_in_it",
        ),
        "how long the loop is blocked: a figure of `make bench-serve`",
    ),
    8: Complaint(
        "The server's CPU time limits the GPU.",
        (),
        "throughput and delays are figures of `make bench-serve` and benchmarks/bench_http.py; tests measure no speed",
    ),
    9: Complaint(
        "An error hides in a 200, or the stream just stops.",
        (
            "complaints/test_over_http.py::test_an_error_at_any_step_ends_a_stream_with_an_error",
            "test_openai_client.py::test_an_error_in_the_middle_ends_the_stream",
            "test_openai_client.py::test_an_error_that_comes_with_the_first_text",
            "test_processes.py::test_an_engine_that_dies_ends_its_streams_with_an_error",
        ),
    ),
    10: Complaint(
        "A prompt is cut in silence.",
        (
            "test_http.py::test_an_error_of_a_long_prompt_gives_advice_that_can_be_followed",
            "test_openai_client.py::test_refusals",
        ),
    ),
    11: Complaint(
        "Log-probabilities of minus infinity give a 500; offsets are wrong.",
        (
            "complaints/test_over_http.py::test_log_probabilities_are_finite_numbers",
            "test_engine.py::test_log_probabilities_are_the_model_s",
            "test_prompt_logprobs.py::test_offsets_are_places_in_the_text",
        ),
    ),
    12: Complaint(
        "The queue has no end, and everything gets slow for all.",
        (
            "complaints/test_over_http.py::test_too_many_requests_are_refused_at_once_and_the_others_answered",
            "test_engine.py::test_the_queue_has_an_end",
        ),
        "the delay of accepted requests under overload: a figure",
    ),
    13: Complaint(
        "Streams are cut when a new version is deployed.",
        (
            "test_processes.py::test_a_drain_lets_streams_finish",
            "ops/test_chaos.py::test_a_drain_refuses_new_requests_and_finishes_old_ones",
            "ops/test_chaos.py::test_requests_that_outlive_a_drain_end_with_an_error",
            "tests/install/ray_cluster.py::test_a_new_version_takes_over_without_errors",
        ),
    ),
    14: Complaint("Memory grows over days.", ("test_soak.py::test_requests_and_disconnects_leave_nothing",)),
    15: Complaint(
        "Garbage collection pauses streams.",
        ("test_cycles.py::test_requests_leave_no_cycles",),
        "pauses themselves: a figure of `make bench-serve`",
    ),
    16: Complaint(
        "Stop strings are missed between chunks, or leak.",
        (
            "complaints/test_over_http.py::test_an_answer_ends_before_the_first_stop_string",
            "test_http.py::test_the_grammar_of_a_stream",
            "tests/generate/test_output.py::test_stream_never_shows_part_of_a_stop_string",
        ),
    ),
    17: Complaint(
        "A change of models ends others' requests, or loads a model twice.",
        (
            "ops/test_registry.py::Models",
            "ops/test_registry.py::test_loading_is_done_once",
            "ops/test_registry.py::test_unloading_waits_for_what_is_open",
            "ops/test_operation.py::test_models_are_loaded_when_they_are_asked_for_and_by_operators",
        ),
    ),
    18: Complaint(
        "An adapter that does not exist is loaded with a 200; loading and use race.",
        (
            "complaints/test_over_http.py::test_adapters_come_and_go_while_they_are_used",
            "security/test_access.py::test_adapters_come_from_allowed_folders_only",
        ),
    ),
    19: Complaint(
        "A long prompt looks dead, and proxies cut the connection.",
        ("complaints/test_over_http.py::test_an_engine_that_computes_silences_no_stream",),
    ),
    20: Complaint(
        "A huge `n`, huge log-probabilities or bodies end the server.",
        (
            "security/test_bodies.py::test_too_much_of_anything_is_refused_with_its_field",
            "security/test_bodies.py::test_prompts_and_choices_are_limited_together",
            "test_http.py::test_sizes",
        ),
    ),
    21: Complaint(
        "Templates run clients' code, or do not end.",
        (
            "test_http.py::test_variables_of_a_template_do_not_change_how_it_is_rendered",
            "tests/core/test_tokenizer_families.py::test_template_bombs_end_with_an_error",
            "ops/test_chaos.py::test_templates_are_rendered_after_their_processes_have_died",
        ),
    ),
    22: Complaint(
        "URLs of images reach the inner network.",
        ("test_images.py::test_bad_images_are_refused_with_their_place",),
        "remote images are not built: nothing is fetched",
    ),
    23: Complaint(
        "An image is decoded before its size is checked.",
        (
            "test_images.py::test_requests_with_too_much_are_refused",
            "security/test_decoder.py::test_one_that_takes_too_long_is_ended_and_replaced",
        ),
    ),
    24: Complaint(
        "A bad grammar ends the server.",
        (
            "security/test_bodies.py::test_no_pattern_takes_for_ever",
            "security/test_bodies.py::test_a_grammar_without_an_end_is_refused",
            "tests/filters/test_compile_budget.py::test_an_endless_compilation_is_ended",
        ),
    ),
    25: Complaint(
        "The prefix cache tells one tenant of another's prompts.",
        (
            "security/test_access.py::test_with_salts_no_key_finds_the_pages_of_another",
            "test_openai_client.py::test_salts_share_no_cache",
        ),
    ),
    26: Complaint(
        "Slow senders hold connections.",
        (
            "ops/test_limits.py::test_slow_headers_end_only_their_connection",
            "ops/test_limits.py::test_a_body_that_drips_ends_before_its_whole_time",
        ),
    ),
    27: Complaint(
        "Ray adds a delay and costs throughput.", (), "figures, which need a cluster; tests measure no speed"
    ),
    28: Complaint(
        "Metrics of several processes are wrong or missing.",
        (
            "complaints/test_over_http.py::test_counts_of_several_workers_are_one_sum",
            "ops/test_operation.py::test_durations_of_requests_are_measured",
        ),
    ),
    29: Complaint(
        "Speculation loses output or changes it.",
        (
            "test_engine.py::test_several_tokens_of_a_step_are_one_event",
            "test_equality.py::test_a_few_random_requests",
            "tests/generate/test_dynamic_features.py::test_drafting_keeps_max_new_tokens_exact",
        ),
    ),
    30: Complaint(
        "Parameters are ignored.",
        (
            "test_http.py::test_fields_are_accepted_or_the_error_names_them",
            "test_other_fields.py::test_the_error_names_a_field_of_vllm_or_llama_cpp",
            "test_other_fields.py::test_a_request_of_sillytavern_means_what_it_says",
            "test_openai_client.py::test_unknown_fields_are_named",
        ),
    ),
    31: Complaint(
        "The cache answers with pages of another adapter or image.",
        (
            "tests/generate/test_adapters.py::test_a_change_of_adapters_never_finds_the_pages_of_others",
            "tests/generate/test_page_names.py::test_adapters_are_named_by_content_order_and_scale",
            "test_images.py::test_cached_pages_are_found_by_the_content_of_images",
            "test_equality.py::test_a_few_random_requests",
        ),
    ),
    32: Complaint(
        "Unloading a model does not return its memory.",
        ("ops/test_operation.py::test_loading_and_unloading_leaves_nothing",),
    ),
    33: Complaint("Nagle's algorithm delays tokens.", ("complaints/test_over_http.py::test_packets_are_not_delayed",)),
    34: Complaint(
        "A dependency is malicious.",
        ("ops/test_deploy.py::test_every_package_of_the_lock_file_has_a_hash",),
    ),
    35: Complaint(
        "Answers change with the load.",
        (
            "test_openai_client.py::test_sixty_four_at_once_get_what_each_gets_alone",
            "test_equality.py::test_a_few_random_requests",
        ),
    ),
    36: Complaint(
        "Usage is missing, early, or in another chunk than clients read.",
        (
            "test_http.py::test_the_grammar_of_a_stream",
            "test_openai_client.py::test_a_stream_equals_the_whole_answer",
            "test_openai_client.py::test_usage_tells_what_was_cached",
        ),
    ),
    37: Complaint(
        "A wrong model name is answered by whatever is loaded, or a client with a fixed name gets no answer.",
        (
            "complaints/test_over_http.py::test_a_wrong_name_is_answered_by_no_model_unless_configured",
            "test_other_fields.py::test_the_path_models_with_a_slash_lists_models",
            "ops/test_worker_models.py::test_a_model_whose_tokenizer_is_being_read_is_listed_as_loading",
        ),
    ),
    38: Complaint("A reload of the page loses a long answer.", (), "not built: a stream ends with its connection"),
    39: Complaint(
        "Control tokens typed by a user, or returned by a tool, forge turns.",
        (
            "security/test_bodies.py::test_special_tokens_spelled_by_clients_stay_text",
            "tests/generate/test_text_tokenizer.py::test_special_tokens_spelled_by_a_user_stay_text",
            "test_channels.py::test_text_cannot_forge_a_marker_that_is_a_token",
        ),
    ),
    40: Complaint(
        "A burst of requests delays the answer about health, and the server is ended for it.",
        ("complaints/test_over_http.py::test_health_is_answered_in_a_burst",),
    ),
}


@cache
def names(path: Path) -> frozenset[str]:
    """Tests and state machines at the top of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(node.name for node in tree.body if isinstance(node, kinds))


def test_every_number_has_tests_or_a_reason() -> None:
    assert list(COMPLAINTS) == list(range(1, 41))
    for complaint in COMPLAINTS.values():
        assert complaint.tests or complaint.untested, complaint.what


@pytest.mark.parametrize("number", COMPLAINTS)
def test_the_tests_exist(number: int) -> None:
    for test in COMPLAINTS[number].tests:
        file, _, name = test.partition("::")
        path = ROOT / (file if file.startswith("tests/") else f"tests/serve/{file}")
        assert name in names(path), test
