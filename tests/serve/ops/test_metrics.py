"""The registry of metrics: what engines and workers tell, under both names."""

from __future__ import annotations

from typing import Any

from exl_serve.engine.client import EngineStatus
from exl_serve.metrics import GAP_BUCKETS, Gaps
from exl_serve.super.registry import Metrics


def status(boot: bytes, step: int, seconds: float, free: int = 5, **more: Any) -> EngineStatus:
    fields = dict.fromkeys(("decoding", "prefilling", "queued", "queued_prompt_tokens", "pages_pinned"), 0)
    fields |= {"pages_cached": 3, "pages_free": free}
    values: dict[str, Any] = {"began": 0.0, "ended": 0.0, "prefill_rate": 0.0, "decode_rate": 0.0}
    return EngineStatus(
        boot=boot, state="ready", step=step, step_seconds=seconds, page_size=256, **fields, **values, **more
    )


def lines(metrics: Metrics) -> set[str]:
    return set(metrics.text().splitlines())


def test_counts_of_an_engine_go_on_when_it_is_started_again() -> None:
    metrics = Metrics()
    metrics.engine("m", status(b"a", 10, 0.5))
    metrics.engine("m", status(b"a", 14, 0.75, preemptions=2))
    metrics.engine("m", status(b"b", 3, 0.25, preemptions=1))
    assert {
        'exl_steps_total{model_name="m"} 17.0',
        'exl_step_seconds_total{model_name="m"} 1.0',
        'vllm:num_preemptions_total{model_name="m"} 3.0',
        'vllm:cache_config_info{block_size="256",model_name="m",num_gpu_blocks="8"} 1.0',
    } <= lines(metrics)


def test_a_model_has_one_size_of_its_cache() -> None:
    metrics = Metrics()
    metrics.engine("m", status(b"a", 1, 0.5))
    metrics.engine("other", status(b"b", 1, 0.5))
    metrics.engine("m", status(b"c", 1, 0.5, free=13))
    for name in ("exl_cache_info", "vllm:cache_config_info"):
        assert {line for line in lines(metrics) if line.startswith(name)} == {
            name + '{block_size="256",model_name="m",num_gpu_blocks="16"} 1.0',
            name + '{block_size="256",model_name="other",num_gpu_blocks="8"} 1.0',
        }


def test_tokens_that_come_together_share_the_time_before_them() -> None:
    gaps = Gaps(1)
    gaps.take(0, 1.0, 3)
    gaps.take(0, 1.016, 4)
    gaps.take(0, 1.02, 0)
    gaps.take(0, 1.036, 1)
    found = {bound: count for bound, count in zip(GAP_BUCKETS, gaps.counts, strict=False) if count}
    assert found == {0.005: 4, 0.025: 1}
    assert abs(gaps.total - 0.036) < 1e-9


def test_times_between_tokens_are_one_histogram_of_all_workers() -> None:
    gaps = Gaps(2)
    for choice, at in ((0, 1.0), (1, 1.0), (0, 1.004), (1, 1.04), (0, 1.504)):
        gaps.take(choice, at)
    assert sum(gaps.counts) == 3
    metrics = Metrics()
    for _ in range(2):
        metrics.spread([("exl_inter_token_seconds", {"model_name": "m"}, gaps.counts, gaps.total)])
    for name in ("exl_inter_token_seconds", "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        found = {line.removeprefix(name) for line in lines(metrics) if line.startswith(name)}
        assert {
            '_bucket{le="0.0025",model_name="m"} 0.0',
            '_bucket{le="0.005",model_name="m"} 2.0',
            '_bucket{le="0.05",model_name="m"} 4.0',
            '_bucket{le="+Inf",model_name="m"} 6.0',
            '_count{model_name="m"} 6.0',
        } <= found
        (total,) = [float(one.split()[1]) for one in found if one.startswith("_sum")]
        assert abs(total - 2 * gaps.total) < 1e-9


def test_series_of_other_shapes_are_left_out() -> None:
    metrics = Metrics(alias=False)
    right = [0] * (len(GAP_BUCKETS) + 1)
    name = "exl_inter_token_seconds"
    metrics.spread(
        [
            ("exl_other", {"model_name": "m"}, right, 0.0),
            (name, {"model": "m"}, right, 0.0),
            (name, {"model_name": "m"}, right[1:], 0.0),
            (name, {"model_name": "m"}, [-1, *right[1:]], 0.0),
        ]
    )
    assert not [line for line in lines(metrics) if line.startswith((name, "vllm:"))]


def test_requests_that_failed_or_were_left_are_no_successes() -> None:
    metrics = Metrics()
    for reason in ("stop", "abort", "error"):
        metrics.count("exl_requests_total", model_name="m", finished_reason=reason)
    found = lines(metrics)
    for reason in ("stop", "abort", "error"):
        assert f'exl_requests_total{{finished_reason="{reason}",model_name="m"}} 1.0' in found
        alias = f'vllm:request_success_total{{finished_reason="{reason}",model_name="m"}} 1.0'
        assert (alias in found) == (reason == "stop")
