"""`make audit`: which versions in `lock.txt` and `torch.txt` have published advisories, and what fixes them.

    python constraints/audit.py [--url https://api.osv.dev]

Exit codes: 0 if none has, 1 if some have, 2 if the advisories can't be read: then nothing was checked.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)
PATIENCE_S = 20.0


def pins() -> list[tuple[str, str]]:
    """Every package and version."""
    return [pin for name in ("lock.txt", "torch.txt") for pin in PIN.findall((HERE / name).read_text())]


def advisories(url: str, pinned: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A line for each advisory. Raises httpx.HTTPError, ValueError, KeyError or TypeError if that is no source."""
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in pinned]
        answer = client.post("/v1/querybatch", json={"queries": queries}).raise_for_status().json()
        for (name, version), result in zip(pinned, answer["results"], strict=True):
            for found in result.get("vulns", []):
                advisory = client.get(f"/v1/vulns/{found['id']}").raise_for_status().json()
                fixes = ", ".join(sorted(_fixes(advisory, name))) or "no version yet"
                yield f"{name} {version}: {found['id']}, fixed in {fixes}: {advisory.get('summary', '')}"


def _fixes(advisory: dict[str, Any], name: str) -> set[str]:
    return {
        event["fixed"]
        for affected in advisory["affected"]
        if affected["package"]["name"].lower() == name.lower()
        for span in affected.get("ranges", [])
        if span["type"] == "ECOSYSTEM"
        for event in span["events"]
        if "fixed" in event
    }


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
