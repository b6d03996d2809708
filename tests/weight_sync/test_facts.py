"""What processes tell of themselves, and how a difference is told."""

from __future__ import annotations

import torch

from megatron_rl.facts import disagreements, process_facts


def test_only_what_must_agree_is_reported(monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("HOSTNAME", "node-3")
    facts = process_facts("cpu")
    assert facts["environment"] == {"NCCL_CUMEM_ENABLE": "0"}
    assert (facts["torch"], facts["nccl"], facts["device"]) == (torch.__version__, None, "cpu")


def test_members_that_agree_are_no_news():
    trainer = {"torch": "2.13", "environment": {"NCCL_CUMEM_ENABLE": "0"}}
    assert disagreements({"trainer-0": trainer, "trainer-1": trainer, "engine 0": {**trainer, "vllm": "0.32"}}) == []


def test_who_differs_in_what_is_named():
    """verl#5522, SkyRL#143: NCCL_CUMEM_ENABLE on one side only hangs the communicator."""
    facts = {"trainer-0": {"torch": "2.13", "environment": {"NCCL_CUMEM_ENABLE": "0"}},
             "trainer-1": {"torch": "2.13", "environment": {"NCCL_CUMEM_ENABLE": "0"}},
             "engine 0": {"torch": "2.12", "vllm": "0.32", "environment": {}},
             "engine 1": {"torch": "2.13", "vllm": "0.31", "environment": {"NCCL_CUMEM_ENABLE": "0"}}}
    assert disagreements(facts) == [
        "torch: 2.13 on trainer-0, trainer-1, engine 1; 2.12 on engine 0",
        "vllm: 0.32 on engine 0; 0.31 on engine 1",
        "NCCL_CUMEM_ENABLE: 0 on trainer-0, trainer-1, engine 1; unset on engine 0"]
