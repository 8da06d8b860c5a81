"""Stand-ins for vLLM where TRL meets it: a server over real sockets, and an engine in the same process. They store what they are sent."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from trl.generation import vllm_client, vllm_generation

ANSWER = [5, 6, 7, 8]  # what each prompt is answered with
PACKED = 4000  # bytes: the client joins so many of them at a time


def read_all(connection: socket.socket, nbytes: int) -> bytearray:
    found = bytearray()
    while len(found) < nbytes:
        found += connection.recv(nbytes - len(found)) or b""
    return found


class Server(ThreadingHTTPServer):
    """Answers TRL's client, and takes weights by a socket of their own."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.weights: dict[str, Tensor] = {}
        self.updates, self.fails = 0, False
        self.channel = socket.create_server(("127.0.0.1", 0))
        self.connection: socket.socket | None = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        if self.connection is None:
            self.connection, _ = self.channel.accept()
        self.weights = {}
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            kind = getattr(torch, dtype)
            raw = read_all(self.connection, torch.Size(shape).numel() * kind.itemsize)
            self.weights[name] = torch.frombuffer(raw, dtype=kind).view(shape)
        self.updates += 1

    def end(self) -> None:
        self.shutdown()
        self.server_close()
        for each in (self.connection, self.channel):
            if each is not None:
                each.close()


class Answering(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        known: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"data": [{"id": "a stand-in"}]},
            "/server_info?config_format=json": {
                "vllm_config": {"weight_transfer_config": {}, "model_config": {"logprobs_mode": "processed_logprobs"}}
            },
            "/get_world_size": {"world_size": 1},
        }
        self.answer(known[self.path])

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path == "/update_weights":
            info = asked["update_info"]
            self.server.receive(info["names"], info["dtype_names"], info["shapes"])
        if self.path == "/start_weight_update" and self.server.fails:
            self.answer({"error": "out of memory"}, 400)
            return
        known: dict[str, Any] = {"/reset_prefix_cache": {"success": True}}
        if self.path == "/v1/completions":
            logprobs = {
                "tokens": [f"token_id:{t}" for t in ANSWER],
                "token_logprobs": [-1.0] * len(ANSWER),
                "top_logprobs": [None] * len(ANSWER),
            }
            one = {"token_ids": ANSWER, "logprobs": logprobs}
            known[self.path] = {"choices": [{"prompt_token_ids": p, **one} for p in asked["prompt"] for _ in range(asked["n"])]}
        self.answer(known.get(self.path, {}))

    def answer(self, what: object, status: int = 200) -> None:
        raw = json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def _joins(client: Any, device: Any) -> None:
    """In place of NCCL's rendezvous, which needs a GPU."""
    client._post(f"{client.base_url}/init_weight_transfer_engine", json={"init_info": {}})
    client.communicator = socket.create_connection(("127.0.0.1", client.group_port))
    client.close_communicator = client.communicator.close


class Transfer:
    """As vLLM's packed sending: it keeps tensors until there are enough, and joins them then."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, Tensor]], trainer_args: Any) -> None:
        kept: list[Tensor] = []
        for _, tensor in iterator:
            kept.append(tensor)
            if sum(each.nbytes for each in kept) > PACKED:
                Transfer.send(kept, trainer_args.group)
        Transfer.send(kept, trainer_args.group)

    @staticmethod
    def send(kept: list[Tensor], to: socket.socket) -> None:
        to.sendall(b"".join(bytes(each.reshape(-1).view(torch.uint8).tolist()) for each in kept))
        kept.clear()


class LLM:
    """An engine in this process."""

    def __init__(self, **options: Any) -> None:
        self.weights: dict[str, Tensor] = {}
        self.awake = {"weights", "kv_cache"}
        self.looks: Any = None  # called while it generates
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)),
            model_config=SimpleNamespace(max_model_len=64),
        )

    def load(self, named: list[tuple[str, Tensor]]) -> None:
        assert "weights" in self.awake
        self.weights |= {name: tensor.clone() for name, tensor in named}

    def sleep(self, level: int) -> None:
        self.awake, self.weights = set(), {}

    def wake_up(self, tags: list[str]) -> None:
        self.awake |= set(tags)

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[Any], **options: Any) -> list[Any]:
        assert self.awake == {"weights", "kv_cache"} and self.weights
        if self.looks is not None:
            self.looks()
        logprobs = [{token: SimpleNamespace(rank=1, logprob=-1.0)} for token in ANSWER]
        answer = SimpleNamespace(token_ids=ANSWER, logprobs=logprobs)
        return [SimpleNamespace(prompt_token_ids=each["prompt_token_ids"], outputs=[answer]) for each in prompts]


@contextmanager
def vllm_stands_in() -> Iterator[None]:
    """TRL finds vLLM."""
    with ExitStack() as stack:
        for module in (vllm_client, vllm_generation):
            stack.enter_context(patch.object(module, "is_vllm_available", lambda *_, **__: True))
        stack.enter_context(patch.object(vllm_client.VLLMClient, "init_communicator", _joins))
        arguments = lambda group, packed: SimpleNamespace(group=group)  # noqa: E731
        named = {"NCCLWeightTransferEngine": Transfer, "NCCLTrainerSendWeightsArgs": arguments}
        stack.enter_context(patch.multiple(vllm_client, create=True, _HAS_STATEFUL_TRAINER_ENGINE=False, **named))
        stack.enter_context(patch.multiple(vllm_generation, create=True, LLM=LLM, SamplingParams=SimpleNamespace, empty_cache=lambda: None))
        yield
