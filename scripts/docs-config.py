#!/usr/bin/env python3
"""Write docs/configuration.md from the settings in the code; ``--check`` only tells whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from maru_core.config import ENVIRON_PREFIX, FORMER_NAMES, PREFIX, settings  # noqa: E402

TARGET = ROOT / "docs" / "configuration.md"

HEAD = """\
# Configuration

<!-- Written by scripts/docs-config.py from maru_core/config.py; change the text there. -->

Every setting has one name. It is looked for in three places, and the first that has it counts:

1. vLLM's `kv_connector_extra_config` (or the mapping given to `MaruConfig.from_mapping`), under the name below;
2. the environment, under the name in capitals: `maru_pool_size` is `{prefix}POOL_SIZE`. An empty variable is not set;
3. the default.

```json
{{"kv_connector": "MaruKVConnector", "kv_connector_module_path": "maru_integrations.vllm", "kv_role": "kv_both",
 "kv_connector_extra_config": {{"maru_pool_size": "16G", "maru_cache_namespace": "production"}}}}
```

An unknown `maru_*` key in the mapping stops the start and names the nearest; so does one in capitals, as a variable is
spelt, and a value of the wrong type or out of range, with the key, the value and what was expected. An unknown
`{prefix}*` variable is only warned of. Those that start like `{prefix}DAX_` belong to the plugin of that name while it
is installed ([plugins.md](plugins.md), [hints.md](hints.md)). Keys without the prefix belong to others and are ignored.

Sizes are bytes, or text with `K`, `M`, `G`, `T` (also `KB`, `KiB` and so on); all are powers of 1024. They are per pool
and host, not per rank. Times are seconds.

## Settings
"""

TAIL = """
## Former names

They still work and warn. When both are given, the current one counts.

| former name | current name |
|---|---|
{former}

## Plugins

Read from the environment of every process, because they decide what is imported at all:

| variable | meaning |
|---|---|
| `MARU_PLUGINS` | Unset or empty: every installed plugin. `none`: none. `a,b`: only these. \
Backends and engines that come with Maru are always there. A plugin outside the list is never imported. |
| `MARU_PLUGINS_STRICT` | `1` makes every plugin problem fatal, instead of one warning and going on without. |
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD.format(prefix=ENVIRON_PREFIX)]
    for attribute in settings():
        facts = attribute.metadata
        unit = f" Unit: {facts['unit']}." if facts["unit"] else ""
        parts.append(
            f"### `{PREFIX}{attribute.name}`\n\n{facts['help']}{unit}\n\n"
            f"- Expected: {facts['kind'].expected}\n- Default: {_shown(facts['default'])}\n"
        )
    former = "\n".join(f"| `{old}` | `{new}` |" for old, new in FORMER_NAMES.items())
    return "\n".join(parts) + TAIL.format(former=former)


def _shown(default: object) -> str:
    if default is None or default in ("", ()):
        return "not set"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    page = render()
    if arguments == ["--check"]:
        if TARGET.exists() and TARGET.read_text() == page:
            return 0
        print(f"{TARGET.relative_to(ROOT)} is out of date: run scripts/docs-config.py", file=sys.stderr)
        return 1
    if arguments:
        print("usage: docs-config.py [--check]", file=sys.stderr)
        return 2
    TARGET.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
