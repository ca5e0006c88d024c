"""Who gets in: by token or password, then by cookie, under the right host name."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from ajet.observe.viewer.pages import Access, Gate, sign_in


def client(access: Access, base: str = "http://127.0.0.1") -> TestClient:
    app = Starlette(
        routes=[Route(path, lambda _: PlainTextResponse("ok")) for path in ("/", "/page", "/api/data", "/login")],
        middleware=[Middleware(Gate, access=access)],
    )
    return TestClient(app, base_url=base, follow_redirects=False)


def test_the_token_is_exchanged_for_a_cookie_and_leaves_the_address() -> None:
    access = Access()
    visitor = client(access)
    assert visitor.get("/page").headers["location"] == "/login?next=%2Fpage"
    assert visitor.get("/api/data").status_code == 401
    assert visitor.get("/page?token=wrong").headers["location"] == "/login?wrong=1"
    first = visitor.get(f"/page?a=1&token={access.token}")
    assert first.status_code == 303 and first.headers["location"] == "/page?a=1"
    assert "HttpOnly" in first.headers["set-cookie"] and "samesite=lax" in first.headers["set-cookie"].lower()
    assert visitor.get("/page").text == visitor.get("/api/data").text == "ok"
    stranger = client(Access())
    stranger.cookies.set(access.cookie, access.cookie_value)
    assert stranger.get("/page").status_code == 303, "a cookie is good for one server"


def test_with_a_password_the_token_is_worth_nothing() -> None:
    access = Access(password="long enough", hosts=())
    assert client(access).get(f"/page?token={access.token}").headers["location"].startswith("/login")
    assert access.admits("long enough") and not access.admits(access.token)


def test_guessing_is_slow_and_the_right_secret_always_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("ajet.observe.viewer.pages.time.monotonic", lambda: now[0])
    access = Access(password="long enough")
    for _ in range(20):
        assert not access.admits("guess")
    assert access.pause_s == 0
    assert not access.admits("guess \ud800 é")
    assert access.pause_s > 0
    assert access.admits("long enough")
    now[0] += 61
    assert access.pause_s == 0


def test_cookies_of_any_bytes_are_no_error() -> None:
    access = Access()
    headers = {"cookie": f"{access.cookie}=é".encode()}
    assert client(access).get("/api/data", headers=headers).status_code == 401


@pytest.mark.parametrize("base", ["http://127.0.0.1:8642", "http://localhost", "http://[::1]:80", "http://LOCALHOST"])
def test_this_machine_s_own_names_are_served(base: str) -> None:
    assert client(Access(), base).get("/login").status_code == 200


def test_other_names_are_not() -> None:
    access = Access()
    assert client(access, "http://rebound.example").get(f"/?token={access.token}").status_code == 421


@pytest.mark.parametrize("where", ["https://elsewhere.example/", "//elsewhere.example", "/\\elsewhere.example", ""])
def test_signing_in_never_leads_to_another_site(where: str) -> None:
    assert sign_in(Access(), where).headers["location"] == "/"


def test_every_answer_is_protected() -> None:
    for path in ("/", "/login", "/api/data", "/none"):
        headers = client(Access()).get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'") and "no-store" in headers.values()
