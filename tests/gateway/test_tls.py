"""HTTPS at the gateway, with a certificate made for the test."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from ajet.config import make_config
from ajet.config.contradictions import contradictions
from ajet.gateway import Gateway, GatewaySettings
from ajet.system.http_server import AddressError
from support.gateway_parts import LineEngine, new_session


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert), "-days",
         "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_model_calls_over_https(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate

    async def run() -> None:
        config = make_config({"gateway.tls_cert": str(cert), "gateway.tls_key": str(key)})
        gateway = Gateway(GatewaySettings.from_config(config))
        await gateway.start()
        episode = gateway.register(new_session(LineEngine("hello")))
        assert episode.base_url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(cert))
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"authorization": f"Bearer {episode.api_key}"}
        async with httpx.AsyncClient(verify=trusted, trust_env=False) as client:
            reply = await client.post(f"{episode.base_url}/chat/completions", json=body, headers=headers)
            assert reply.json()["choices"][0]["message"]["content"] == "hello"
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await client.get(episode.base_url)
            with pytest.raises(httpx.HTTPError):
                await client.get(episode.base_url.replace("https", "http"))
        await gateway.aclose()

    asyncio.run(run())


def test_processes_of_this_machine_need_no_certificate(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    keys = {"gateway.tls_cert": str(cert), "gateway.tls_key": str(key), "task_runner.wrapper_type": "multi-processing"}

    async def run() -> None:
        config = make_config(keys)
        assert list(contradictions(config.ajet, "local")) == []
        gateway = Gateway(GatewaySettings.from_config(config))
        await gateway.start()
        episode = gateway.register(new_session(LineEngine("hello")))
        first, second = await asyncio.gather(gateway.local_url(), gateway.local_url())
        assert first == second and first.startswith("http://127.0.0.1:")
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.post(f"{first}/chat/completions", json=body)).status_code == 401
            reply = await client.post(
                f"{first}/chat/completions", json=body, headers={"authorization": f"Bearer {episode.api_key}"}
            )
            assert reply.json()["choices"][0]["message"]["content"] == "hello"
            await gateway.aclose()
            with pytest.raises(httpx.HTTPError):
                await client.get(first)

    asyncio.run(run())


def test_wrong_files_are_named(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, _ = certificate
    wrong = {"gateway.tls_cert": str(cert), "gateway.tls_key": str(cert)}
    with pytest.raises(AddressError, match=r"gateway.tls_cert and gateway.tls_key: .*not a certificate"):
        GatewaySettings.from_config(make_config(wrong))
    half = make_config({"gateway.tls_cert": str(cert)}).ajet
    assert any("go together" in found.what for found in contradictions(half, "local"))
