"""`make audit`: which versions, locked or installed here, have published advisories, and what fixes them.

    python constraints/audit.py [--url https://api.osv.dev]

Exit codes: 0 if none has, 1 if some have, 2 if the advisories can't be read: then nothing was checked. make
itself ends with 2 in both of these cases.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import httpx
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)
PATIENCE = httpx.Timeout(20.0, connect=5.0)
"""A network that swallows packets is noticed within seconds."""


def pins() -> list[tuple[str, str]]:
    """Every package and version that `make env` asks for or that is here: what torch asks for is in no lock."""
    asked = [pin for name in ("lock.txt", "torch.txt") for pin in PIN.findall((HERE / name).read_text())]
    here = [(package.name, package.version) for package in distributions() if package.name != "agentjet"]
    # "2.13.0+cpu" is a build of 2.13.0, which is what an advisory names
    return sorted({(canonicalize_name(name), version.partition("+")[0]) for name, version in asked + here})


def advisories(url: str, pinned: list[tuple[str, str]]) -> Iterator[str]:
    """A line for each advisory. Raises httpx.HTTPError, ValueError, KeyError or TypeError if that is no source."""
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in pinned]
        while queries:
            answer = client.post("/v1/querybatch", json={"queries": queries}).raise_for_status().json()
            further = []
            for query, result in zip(queries, answer["results"], strict=True):
                name, version = query["package"]["name"], query["version"]
                for found in result.get("vulns", []):
                    advisory = client.get(f"/v1/vulns/{found['id']}").raise_for_status().json()
                    fixes = ", ".join(_fixes(advisory, name)) or "no version yet"
                    yield f"{name} {version}: {found['id']}, fixed in {fixes}: {advisory.get('summary', '')}"
                if token := result.get("next_page_token"):
                    further.append({**query, "page_token": token})
            queries = further


def _fixes(advisory: dict[str, Any], name: str) -> list[str]:
    """As they are written, in the advisory's order: some are dates or tags, which no rule of versions can sort."""
    fixes = []
    for affected in advisory["affected"]:
        package = affected.get("package", {})  # without one, it is about a repository's commits
        if package.get("ecosystem") == "PyPI" and canonicalize_name(package["name"]) == name:
            spans = [span for span in affected.get("ranges", []) if span["type"] == "ECOSYSTEM"]
            fixes += [event["fixed"] for span in spans for event in span["events"] if "fixed" in event]
    return list(dict.fromkeys(fixes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="https://api.osv.dev", help="where the advisories are (OSV's API)")
    url = parser.parse_args().url
    pinned = pins()
    try:
        found = list(advisories(url, pinned))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        why = str(error).partition("\n")[0]
        print(
            f"error: the advisories at {url} can't be read ({type(error).__name__}: {why}): nothing was checked. Try "
            "again from a machine that reaches it, or name a mirror with --url",
            file=sys.stderr,
        )
        return 2
    for line in found:
        print(line)
    print(f"{len(pinned)} versions checked: {len(found) or 'no'} advisories")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
