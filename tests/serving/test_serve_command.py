"""`dolmen serve` as processes: a model over tp answers as one process does, and all end at once."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import served
import tinyrun
from served import until

import dolmen as package
from benchmarks.killing import workers

material, one_thread = tinyrun.material, tinyrun.one_thread

PROMPTS = ["abc def", "hij", "a b c d e f g h i j", "jjj"]


@pytest.mark.spawn
@pytest.mark.slow
def test_a_model_over_tp_is_served_and_ends_when_asked(material, tmp_path):
    model = served.chatty(material.model, tmp_path / "model")
    words = ["serve", str(model), "--port", "0", "--layout.tp", "2", "--dtype", "float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dolmen", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        try:
            assert running.stdout is not None
            address = running.stdout.readline().removeprefix("serving model at ").strip()
            key = running.stdout.readline().removeprefix("key: ").strip()
            client = openai.OpenAI(base_url=address, api_key=key, max_retries=0, timeout=30)
            long = dict(model="model", prompt="abc", max_tokens=400, stream=True)
            with client.completions.create(**long) as left:  # and is cancelled on both
                next(iter(left))

            def ask(prompt):
                request = dict(model="model", prompt=prompt, temperature=0, max_tokens=16)
                return client.completions.create(**request).choices[0].text

            with ThreadPoolExecutor(8) as threads:
                found = list(threads.map(ask, PROMPTS * 2))
            alone = package.load(model, dtype="float32").generate(PROMPTS, max_new_tokens=16)
            assert found == [one.text for one in alone] * 2
            ranks = [*workers(running.pid).values()]
            assert len(ranks) == 2
            running.send_signal(signal.SIGTERM)
            assert running.wait(60) == 0
            until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
        finally:
            running.kill()
