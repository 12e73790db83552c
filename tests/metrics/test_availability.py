from megatron_rl.metrics import MetricsWriter, read_metrics
from megatron_rl.metrics.run_report import availability


def step(number, seconds, trained, waiting=None):
    row = {"step": number, "step_seconds": seconds, "trainer_busy_fraction": trained}
    return row | ({} if waiting is None else {"generator_wait_fraction": waiting})


def test_shares_are_over_the_time_of_all_steps_and_losses_have_their_recoveries(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    ready = {"step": 0, "event": "generator_ready", "process": "process 1 on here"}
    writer.write("event", {**ready, "generator": "generator-0", "recovery_seconds": 9.0})
    writer.write("step", step(0, 1.0, 0.5, 0.25))
    gone = {"generator": "generator-0", "completions_again": 3, "completions_continued": 2}
    writer.write("event", {"step": 1, "event": "generator_lost", "tokens_continued": 70, **gone})
    writer.write("event", {**ready, "generator": "generator-0", "recovery_seconds": 4.0})
    writer.write("step", step(1, 3.0, 0.9))
    writer.write("event", {"step": 2, "event": "prompt_failed", "prompt_ids": [5]})
    writer.close()
    a = availability(read_metrics(path))
    assert a["trainer_busy"] == (0.5 * 1 + 0.9 * 3) / 4 and a["generators_busy"] == 0.75
    assert (a["generators_lost"], a["generator_recoveries"]) == (1, [4.0])
    assert (a["completions_again"], a["completions_continued"]) == (3, 2)
    assert (a["tokens_continued"], a["prompts_failed"]) == (70, 1)
    assert a["trainer_recoveries"] == []


def test_a_trainer_recovers_from_the_last_row_before_to_the_first_step_after(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("megatron_rl.metrics.metrics_file.time.time", lambda: now[0])
    path = tmp_path / "metrics.jsonl"
    with_three = MetricsWriter(path)
    for number in range(3):
        now[0] += 10
        with_three.write("step", step(number, 10.0, 1.0))
    with_three.close()
    for resumed in (1, 2):  # of three steps, two are trained again; then none
        now[0] += 50
        writer = MetricsWriter(path, resume_step=resumed)
        now[0] += 7
        writer.write("step", step(resumed, 10.0, 1.0))
        writer.close()
    assert availability(read_metrics(path))["trainer_recoveries"] == [57.0, 57.0]
