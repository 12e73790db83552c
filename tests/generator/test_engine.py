"""The engine against transformers in fp32: updates, prefix cache, interruption, scores."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from megatron_rl.messages import (
    Bucket,
    Manifest,
    Partial,
    VersionSpan,
    float_bytes,
    int_bytes,
)
from megatron_rl.rollouts.interruption import Completion
from megatron_rl.weights.manifest import WeightsError
from megatron_rl.weights.store import NONE
from tests.generator import tiny_models
from tests.generator.conftest import KINDS, held_weights, needs_vllm, run_config, running_engine
from tests.generator.tiny_models import END, reference_logprobs, tokenizer
from tests.weights.versions import Versions, as_sent

pytestmark = [pytest.mark.e2e, needs_vllm]
TOLERANCE = 1e-4


def prompt(i: int, length: int = 10) -> list[int]:
    return [1, *(8 + (7 * i + 3 * j) % 20 for j in range(length - 2)), 4]


def worst_error(
    served, prompt_ids: list[int], completion: Completion, budget: int, begun: int = 0
) -> float:
    """Largest difference of a sampled token's log-prob to the reference.

    Tokens of the thinking budget come from one request, those after it from a second one, whose
    prompt is what came before; so are those after the `begun` ones of another engine.
    """
    pieces = [(begun, min(budget, len(completion.token_ids)))]
    if len(completion.token_ids) > budget:
        pieces.append((max(begun, completion.forced[1] or budget), len(completion.token_ids)))
    worst = 0.0
    for start, end in pieces:
        if start >= end:
            continue
        spans = [
            VersionSpan(s.version, max(s.start, start) - start, min(s.end, end) - start)
            for s in completion.spans
            if s.start < end and s.end > start
        ]
        before = prompt_ids + completion.token_ids[:start]
        expected = reference_logprobs(served.models, before, completion.token_ids[start:end], spans)
        found = torch.tensor(completion.logprobs[start:end])
        worst = max(worst, (found - expected).abs().max().item())
    return worst


def check_lengths(completion: Completion) -> None:
    count = len(completion.token_ids)
    ends = [s.end for s in completion.spans]
    assert len(completion.logprobs) == count == ends[-1]
    assert [s.start for s in completion.spans] == [0, *ends[:-1]]


def test_requests_go_on_over_updates_and_every_token_knows_its_version(served):
    engine, budget, answer = served.engine, 120, 10
    prompts = [prompt(i, 8 + i % 5) for i in range(48)]
    # Made before: while this process made one, the engine's would decode on to the end.
    made = [served.make(seed) for seed in range(100, 110)]

    async def work():
        tasks = [asyncio.create_task(engine.complete(p, budget, answer, 1.0)) for p in prompts]
        times = []
        for version, tensors in made:
            manifest = served.versions.write(version, tensors)
            await asyncio.sleep(0.05)
            times.append(await engine.update(manifest))
        return await asyncio.gather(*tasks), times, await held_weights(engine)

    completions, times, held = served.run(work)

    # Updates land in flight, and nothing is aborted or lost.
    assert engine.aborted == 0
    assert sum(t.requests_in_flight > 0 for t in times) >= 3
    assert max(len(c.spans) for c in completions) >= 3
    newest = max(served.models)
    assert engine.version == newest
    for completion in completions:
        check_lengths(completion)
        assert all(0 <= s.version <= newest for s in completion.spans)
        assert len(completion.token_ids) <= budget + len(engine.interruption.phrase) + answer

    # Log-probs: of one version, and of several with the old KV cache kept.
    several = [(p, c) for p, c in zip(prompts, completions, strict=True) if len(c.spans) > 1]
    single = [(p, c) for p, c in zip(prompts, completions, strict=True) if len(c.spans) == 1]
    checked = several[:12] + single[:6]
    worst = max(worst_error(served, p, c, budget) for p, c in checked)
    print(
        f"{served.kind}: {len(several)} of {len(prompts)} with several versions, error {worst:.1e}"
    )
    assert worst < TOLERANCE

    # After ten updates the engine holds the newest version, name by name, bit by bit.
    expected = served.published(newest)
    assert held.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(held[n], expected[n])] == []


def test_the_noise_of_a_named_completion_is_its_own(served):
    engine, budget, answer = served.engine, 40, 10  # the answer is a request of its own

    async def work():
        def named(name: str, begun: Partial | None = None):
            return engine.complete(prompt(1), budget, answer, 1.0, begun, name=name)

        alone = await named("-1 7 0")
        others = [engine.complete(prompt(i), budget, answer, 1.0) for i in range(16)]
        other_name, *_, again = await asyncio.gather(named("-1 7 1"), *others, named("-1 7 0"))
        count = len(alone.token_ids) // 2
        ids, logprobs = int_bytes(alone.token_ids[:count]), float_bytes(alone.logprobs[:count])
        half = Partial(ids, logprobs, [VersionSpan(engine.version, 0, count)], (0, 0))
        return alone, again, other_name, [await named("-1 7 0", half) for _ in range(2)]

    alone, again, other_name, continued = served.run(work)
    assert again.token_ids == alone.token_ids != other_name.token_ids
    assert torch.allclose(torch.tensor(again.logprobs), torch.tensor(alone.logprobs), atol=1e-5)
    if served.kind != "llama4":  # whose last bits depend on the other tokens
        assert again.logprobs == alone.logprobs
    assert continued[0].token_ids == continued[1].token_ids


def test_a_new_request_reads_no_prefix_blocks_of_older_weights(served):
    from megatron_rl.generator import vllm_sampling as sampling

    engine, long_prompt = served.engine, prompt(3, 80)  # two full blocks of 32
    params = sampling.sampling(8, 1.0)

    async def work():
        before = [await engine._requests.run(long_prompt, params) for _ in range(2)]
        await engine.update(served.publish(200))
        return before, [await engine._requests.run(long_prompt, params) for _ in range(2)]

    before, after = served.run(work)
    assert [o[-1].num_cached_tokens for o in before] == [0, 64]
    assert [o[-1].num_cached_tokens for o in after] == [0, 64]
    for outputs in after:
        tokens = [token for o in outputs for token in o.outputs[0].token_ids]
        logprobs = [x for o in outputs for x in o.outputs[0].logprobs.logprobs]
        spans = [VersionSpan(engine.version, 0, len(tokens))]
        expected = reference_logprobs(served.models, long_prompt, tokens, spans)
        assert (torch.tensor(logprobs) - expected).abs().max() < TOLERANCE


def test_a_request_that_has_not_begun_is_prefilled_by_the_new_weights(served, monkeypatch):
    monkeypatch.setattr("megatron_rl.generator.engine.FIRST_TOKEN_SECONDS", 0.0)
    engine, manifest = served.engine, served.publish(300)
    prompts = [prompt(i, 90) for i in range(24)]
    withdrawn: list[str] = []
    abort = engine._llm.abort

    async def count_and_abort(ids: list[str], internal: bool = False) -> None:
        withdrawn.extend(() if internal else ids)
        await abort(ids, internal)

    monkeypatch.setattr(engine._llm, "abort", count_and_abort)

    async def work():
        await engine._map(manifest, "")
        tasks = [asyncio.create_task(engine.complete(p, 6, 3, 1.0)) for p in prompts]
        while not engine.in_flight:
            await asyncio.sleep(0)
        await engine._swap(manifest)  # `update` checks first, and they would begin
        return await asyncio.gather(*tasks)

    completions = served.run(work)
    assert withdrawn
    assert engine.aborted == 0
    for p, completion in zip(prompts, completions, strict=True):
        check_lengths(completion)
        assert worst_error(served, p, completion, 6) < TOLERANCE


def test_interruption_forces_the_phrase_at_the_budget_and_bounds_the_answer(served):
    engine, budget, answer = served.engine, 12, 5
    prompts = [prompt(i) for i in range(24)]

    async def work():
        return await asyncio.gather(*(engine.complete(p, budget, answer, 1.0) for p in prompts))

    completions = served.run(work)
    forced = 0
    for p, completion in zip(prompts, completions, strict=True):
        check_lengths(completion)
        ids = completion.token_ids
        if completion.forced != (0, 0):
            forced += 1
            assert completion.forced == (budget, budget + len(engine.interruption.phrase))
            assert ids[budget : completion.forced[1]] == engine.interruption.phrase
            assert END not in ids[:budget]
            assert len(ids) <= completion.forced[1] + answer
        elif END in ids:
            assert len(ids) <= ids.index(END) + 1 + answer
            assert ids.index(END) < budget
        assert worst_error(served, p, completion, budget) < TOLERANCE
    assert forced >= 8


def test_a_marker_of_two_tokens_interrupts_as_well(served, monkeypatch):
    from megatron_rl.generator.vllm_args import interruption

    engine, budget, answer = served.engine, 100, 5
    config = run_config(served.folder.parent / "v0", think_end="ab", interruption_phrase="(ab")
    rule = interruption(config, tokenizer())
    monkeypatch.setattr(engine, "interruption", rule)

    async def work():
        return await asyncio.gather(
            *(engine.complete(prompt(i), budget, answer, 1.0) for i in range(24))
        )

    completions = served.run(work)
    for completion in completions:
        check_lengths(completion)
        end = completion.forced[1] or rule.end(completion.token_ids)
        assert len(completion.token_ids) <= (end + answer if end >= 0 else budget)
        if completion.forced != (0, 0):
            assert completion.forced == (budget, budget + len(rule.phrase))
            assert completion.token_ids[budget : completion.forced[1]] == rule.phrase
            assert rule.end(completion.token_ids[:budget]) == -1
    assert any(c.forced != (0, 0) for c in completions)


def test_scores_are_the_log_probs_of_the_weights_held(served):
    engine = served.engine
    prompts = [prompt(i, 40) for i in range(12)]
    completions = [prompt(i + 5, 10 + i)[1:] for i in range(12)]

    async def work():
        first = await engine.score(prompts, completions)
        await engine.update(served.publish(400))
        return first, await engine.score(prompts, completions)

    for version, scores in served.run(work):
        for p, c, found in zip(prompts, completions, scores, strict=True):
            expected = reference_logprobs(served.models, p, c, [VersionSpan(version, 0, len(c))])
            assert (torch.tensor(found) - expected).abs().max() < TOLERANCE


def with_buckets(manifest: Manifest, *buckets: Bucket) -> Manifest:
    return msgspec.structs.replace(manifest, buckets=buckets)


def test_a_version_that_is_not_right_is_refused_and_the_engine_goes_on_with_the_old_one(
    served, tmp_path
):
    engine, versions, version = served.engine, served.versions, served.engine.version
    stale = served.publish(500)
    for seed in (501, 502):
        manifest = served.publish(seed)
    name, (first, *others) = f"weights version {manifest.version}", manifest.buckets
    renamed = msgspec.structs.replace(first.tensors[0], name="model.other.weight")
    elsewhere = msgspec.structs.replace(manifest, root=str(tmp_path / "none"))
    folder = Path(shutil.copytree(versions.root / "0", tmp_path / "0"))
    one_owner = with_buckets(manifest, *(b for b in manifest.buckets if b.owner == 0))
    header = versions.stores[1].header.versions_2N

    def cases() -> Iterator[tuple[Manifest, str, str]]:
        """Yield (manifest, folder, error), with one thing wrong while the caller has it."""
        tensors = (renamed, *first.tensors[1:])
        changed = with_buckets(manifest, msgspec.structs.replace(first, tensors=tensors), *others)
        yield changed, "", rf"{name}: .* 1 unexpected \['model.other.weight'\], 0 doubled"
        yield with_buckets(manifest, *manifest.buckets, first), "", rf"{name}: .*[1-9] doubled"
        yield one_owner, "", rf"{name}: .*[1-9][0-9]* missing"
        yield elsewhere, "", rf"{name}: {elsewhere.root}/0 has no store"
        error = f"weights version {stale.version} is not complete in {versions.root}/0"
        yield stale, "", rf"{error}, whose newest is {manifest.version}"
        versions.bucket(manifest.version, 1)[-3] ^= 4
        yield manifest, "", rf"{name}: bucket 1 in {versions.root}/1 has another checksum"
        versions.bucket(manifest.version, 1)[-3] ^= 4
        slot = versions.stores[1].complete(manifest.version)
        header[slot, 0] = NONE
        yield manifest, "", rf"{name} is not complete in {versions.root}/1"
        header[slot, 0] = manifest.version
        yield manifest, str(folder), rf"{folder}/slot0 has \d+ bytes, and these versions need"

    async def work():
        running = asyncio.create_task(engine.complete(prompt(1), 100, 5, 1.0))
        for wrong, place, message in cases():
            with pytest.raises(WeightsError, match=message):
                await engine.update(wrong, place)
        held = await held_weights(engine)
        completion = await running
        await engine.update(manifest)  # nothing is wrong with it any more
        return completion, held, await held_weights(engine)

    completion, held, updated = served.run(work)
    assert completion.spans[-1].version == version
    assert engine.version == manifest.version
    for weights, expected in (held, version), (updated, manifest.version):
        published = served.published(expected)
        assert all(torch.equal(weights[n], published[n]) for n in published)
    assert worst_error(served, prompt(1), completion, 100) < TOLERANCE


def test_a_store_of_all_buckets_is_as_good_as_the_trainers(served, tmp_path):
    engine, version = served.engine, max(served.models) + 1
    served.models[version] = tiny_models.build(served.kind, 600)
    tensors = served.published(version)
    node = Versions(tmp_path / "node", 50_000)
    written = msgspec.structs.replace(node.write(version, tensors), root="/nowhere")
    served.run(lambda: engine.update(written, str(node.root / "0")))
    held = served.run(lambda: held_weights(engine))
    assert engine.version == version
    assert [n for n in tensors if not torch.equal(held[n], tensors[n])] == []
    node.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama"])
def test_two_workers_hold_their_parts_of_each_of_five_versions(kind, tmp_path):
    # `qwen3` has the parts of `llama`: dense layers, and an embedding that is the head as well.
    model_dir = tiny_models.save(kind, 0, tmp_path / "v0")
    versions = Versions(tmp_path / "weights", 50_000, owners=2)
    before = {*Path("/dev/shm").glob("*-cpushm_*")}  # of vLLM's workers
    with running_engine(run_config(model_dir, width=2), model_dir) as (engine, loop):
        for version in range(1, 6):
            tiny_models.save(kind, version, tmp_path / "next")
            tensors = as_sent(tiny_models.checkpoint(tmp_path / "next"))
            manifest = versions.write(version, tensors)

            async def work(manifest=manifest):
                running = asyncio.create_task(engine.complete(prompt(1), 24, 5, 1.0))
                while not engine.in_flight:
                    await asyncio.sleep(0.001)
                await engine.update(manifest)
                return await running, await held_weights(engine)

            _, held = loop.run_until_complete(asyncio.wait_for(work(), 120))
            assert held.keys() == tensors.keys()
            assert [n for n in tensors if not torch.equal(held[n], tensors[n])] == []
        assert {*Path("/dev/shm").glob("*-cpushm_*")} > before
        if kind == "qwen3":  # as a machine that is slow, or short of memory, does
            for process in engine._processes:
                process.kill()
    assert engine.aborted == 0
    assert {*Path("/dev/shm").glob("*-cpushm_*")} <= before
    versions.close()


def test_a_prompt_that_does_not_fit_is_refused_with_the_sizes(served):
    with pytest.raises(ValueError, match=r"a prompt of 300 tokens .* generation.max_prompt_tokens"):
        served.run(lambda: served.engine.complete(prompt(0, 300), 150, 20, 1.0))


def test_a_head_of_another_type_than_the_configuration_says_is_refused(served, monkeypatch):
    engine = served.engine
    served.run(engine.check_head)
    tree = engine._config.model_dump(mode="json")
    for key in ("logits", "generator_logits"):
        other = tree | {"precision": tree["precision"] | {key: "bf16"}}
        monkeypatch.setattr(engine, "_config", type(engine._config).model_validate(other))
        with pytest.raises(RuntimeError, match=r"logits are bfloat16, and worker 0 .* in float32"):
            served.run(engine.check_head)
