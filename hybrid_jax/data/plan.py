"""What hybrid_jax.data.prepare was asked for, as PREFIX.parts/plan.json and a store's manifest record it: what of it
has changed since, and what need not be asked for again."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid_jax.data.inputs import Source
from hybrid_jax.data.manifest import FORMAT, VERSION, path_of, tokenizer_path


def changed(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What of a plan is not what it was, in words; "" if nothing is."""
    try:
        return _changed(old, new)
    except (KeyError, TypeError, AttributeError):
        return "it is damaged, or another version wrote it"


def _changed(old: dict[str, Any], new: dict[str, Any]) -> str:
    if old.get("version") != new["version"]:
        return "another version wrote it"
    known = new["tokenizer"]["sha256"] is not None  # else it is still to be trained
    if known and old["tokenizer"]["sha256"] != new["tokenizer"]["sha256"]:
        return f"--tokenizer was {old['tokenizer']['name']}, is {new['tokenizer']['name']} with other content"
    if not known and old["tokenizer"]["name"] != new["tokenizer"]["name"]:
        return f"--tokenizer was {old['tokenizer']['name']}, is {new['tokenizer']['name']}"
    if known and old["tokenizer"]["end_of_document"] != new["tokenizer"]["end_of_document"]:
        ids = (plan["tokenizer"]["end_of_document"] for plan in (old, new))
        return "--eod_token named the id {}, names {}".format(*ids)
    for name, value in new["options"].items():
        if (was := old["options"].get(name, type(value)())) != value:
            return f"--{name} was {was}, is {value}"
    before, now = ({source["path"]: source for source in plan["sources"]} for plan in (old, new))
    for path in before | now:
        called = f"the {(before | now)[path].get('kind', 'input file')} {path}"
        if path not in now or path not in before:
            return f"{called} is {'new' if path in now else 'gone'}"
        if any(before[path][name] != now[path][name] for name in ("size", "digest")):
            return f"{called} has changed"
    if list(before) != list(now):
        return "the input files have another order"
    return "another version wrote it" if old.get("parts", new["parts"]) != new["parts"] else ""


@dataclasses.dataclass(frozen=True)
class Earlier:
    """What the same command knew when it was given before: its input, options, tokenizer and the file with it; empty
    if it was not."""

    sources: tuple[Source, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    tokenizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    file: Path = Path()

    @staticmethod
    def find(folder: Path, prefix: str) -> "Earlier":
        """Of the parts in the folder, else of the store."""
        plan, file = read_json(folder / "plan.json"), folder / "tokenizer.json"
        if not plan:
            plan, file = read_json(path_of(prefix)), tokenizer_path(prefix)
            plan = plan if plan.get("format") == FORMAT else {}
        try:
            if plan and plan["version"] == VERSION:
                found = tuple(Source(**source) for source in plan["sources"])
                return Earlier(found, dict(plan["options"]), dict(plan["tokenizer"]), file)
        except (KeyError, TypeError, ValueError):  # it is damaged
            pass
        return Earlier()

    def definition(self, name: str) -> str:
        """The content of the file, if it is whole and the tokenizer of this name; else ""."""
        try:
            found = self.file.read_bytes()
        except OSError:
            return ""
        whole = hashlib.sha256(found).hexdigest() == self.tokenizer.get("sha256")
        return found.decode() if whole and self.tokenizer.get("name") == name else ""

    @property
    def origin(self) -> dict[str, Any]:
        """Of the tokenizer, as in vocabulary.Vocabulary."""
        return {name: self.tokenizer[name] for name in ("revision", "trained_on") if name in self.tokenizer}

    def same_text(self, inputs: Sequence[Source], **options: Any) -> bool:
        """Whether these inputs and options are those of before."""
        before, now = ([(x.path, x.size, x.digest) for x in sources] for sources in (self.sources, inputs))
        return before == now and all(self.options.get(name) == value for name, value in options.items())


def read_json(path: Path) -> dict[str, Any]:
    """{} for a file that is missing or no JSON object."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
