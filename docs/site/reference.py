"""The reference of the public names, made from signatures and docstrings, which are read and never imported; and the command's help.

A page asks for one by a comment: `<!-- reference: kvemb.torch -->` for a module's public names, or for the names that are listed behind the
module; `<!-- reference: command -->` for the command.
"""

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent, indent

import griffe

PACKAGES = ("kvemb", "paramserver", "trainer")
_ASKED = re.compile(r"^<!-- reference: ([\w.]+)(?:: ([\w, .]+))? -->$", re.MULTILINE)
_FACADE = re.compile(r'facade\("([\w.]+)"\)')
_EXAMPLE = re.compile(r"(^[ ]*>>> .*\n?(?:^[ ]*\S.*\n?)*)", re.MULTILINE)
_CODE = re.compile(r"(`[^`]+`)")
_NAMES = re.compile(r"[A-Za-z_][\w.]*")
_PAGE = re.compile(r"\bdocs/([\w/-]+\.md)\b")
_DECISION = re.compile(r"\bdocs/adr/(\d{4})\b")
_ALSO = ("kvemb", "kvemb.errors")  # where a name may be from that is written without its module
_Item = griffe.Object | griffe.Alias


class Reference:
    """Turns comments into reference text.

    Args:
        root: of the repository.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules = _load(root)
        self._decisions = {path.name[:4]: path.name for path in (root / "docs/adr").glob("[0-9]*.md")}
        pages = [path.read_text(encoding="utf-8") for path in sorted((root / "docs/api").glob("*.md"))]
        self._items = {name: item for page in pages for asked in _ASKED.finditer(page) for name, item in self._public(asked)}
        self._first: dict[str, str] = {}  # the name under which a thing of several names is shown
        for name, item in self._items.items():
            self._first.setdefault(item.path, name)
        members = (f"{name}.{one.name}" for name, item in self._items.items() if isinstance(item, griffe.Class) for one in _members(item))
        self._known = {*self._items, *members}

    def fill(self, text: str, page: str) -> str:
        """Return a page's text with every comment replaced by what it asks for."""
        up = "../" * (page.count("/") - 1)
        return _ASKED.sub(lambda asked: self._linked(self._shown(asked), up), text)

    def _shown(self, asked: re.Match[str]) -> str:
        return _command() if asked[1] == "command" else "\n".join(self._documented(item, name, 5) for name, item in self._public(asked))

    def _public(self, asked: re.Match[str]) -> Iterator[tuple[str, griffe.Object]]:
        if asked[1] == "command":
            return
        module = self._modules[_behind(self._root, asked[1])]
        public = sorted(module.exports or (), key=lambda name: str(name)[0].isupper())  # what is called, then what it returns
        own = (name for name, item in module.members.items() if item.has_docstring and not item.is_alias and name[0] != "_")
        for name in asked[2].split(", ") if asked[2] else public or own:
            if name == "__doc__":
                yield asked[1], module
                continue
            item = module[str(name)]
            item = item.final_target if isinstance(item, griffe.Alias) else item
            if not isinstance(item, griffe.Module):
                yield f"{asked[1]}.{name}", item

    def _linked(self, text: str, up: str) -> str:
        text = _DECISION.sub(lambda found: f"[decision {found[1]}]({up}adr/{self._decisions[found[1]]})", text)
        return _PAGE.sub(lambda found: f"[{found[1]}]({up}{found[1]})", text)

    def _documented(self, item: _Item, name: str, depth: int) -> str:
        """A directive of Sphinx's for Python, in as many backquotes as `depth`: members stand inside, in fewer."""
        item = item.final_target if isinstance(item, griffe.Alias) else item
        if isinstance(item, griffe.Module):
            return "\n".join(self._sections(item, name))
        kind, heading, options = _heading(item, name.rpartition(".")[2] if depth < 5 else name)
        body = self._sections(item, name)
        if isinstance(item, griffe.Class):
            body += [self._documented(member, f"{name}.{member.name}", depth - 1) for member in _members(item)]
        if depth == 5 and (first := self._first[item.path]) != name:
            options, body = [*options, ":no-index:"], [f"The same as {{py:obj}}`{first}`."]
        fence = "`" * depth
        return "\n".join([f"{fence}{{py:{kind}}} {heading}", *options, "", *body, fence, ""])

    def _sections(self, item: griffe.Object, name: str) -> list[str]:
        kinds = griffe.DocstringSectionKind
        shown: list[str] = []
        for section in item.docstring.parsed if item.docstring else ():
            match section.kind:
                case kinds.text:
                    shown.append(self._prose(section.value, name))
                case kinds.parameters:
                    _require_parameters(item, section.value)
                    shown.append(self._list("Args", [(one.name, one.description) for one in section.value], name))
                case kinds.attributes:
                    shown.append(self._list("Attributes", [(one.name, one.description) for one in section.value], name))
                case kinds.returns | kinds.yields:
                    (one,) = section.value
                    shown.append(f"\n:{section.kind.value.capitalize()}: {_inner(self._prose(one.description, name))}\n")
                case kinds.raises:
                    shown.append(self._list("Raises", [(str(one.annotation), one.description) for one in section.value], name))
                case kinds.admonition:
                    shown.append(f"**{section.title}**\n\n{self._prose(section.value.contents, name)}")
                case _:
                    raise ValueError(f"{item.path}: a section of kind {section.kind.value}, which the reference does not show")
        return shown

    def _list(self, title: str, pairs: Sequence[tuple[str, str]], name: str) -> str:
        def code(word: re.Match[str]) -> str:
            return self._code(word[0], name) if title == "Raises" else f"`{word[0]}`"

        lines = [f"* {_NAMES.sub(code, key.strip('()'))}: {_inner(self._prose(text, name))}" for key, text in pairs]
        return f"\n:{title}:\n{indent(chr(10).join(lines), '    ')}\n"

    def _prose(self, text: str, name: str) -> str:
        """Markdown of a docstring's text: examples are fenced, names are links, what only looks like a tag is text."""
        before, title, tour = text.partition("\nExample: ")
        if ">>> " in tour:  # a tour, indented below its title
            first, _, rest = tour.partition("\n\n")
            text = f"{before}{title}{first}\n\n{dedent(rest)}"
        parts = _EXAMPLE.split(text)
        return "\n".join(_fenced(part) if ">>> " in part else self._plain(part, name) for part in parts).strip() + "\n"

    def _plain(self, text: str, name: str) -> str:
        return "".join(self._code(part[1:-1], name) if part.startswith("`") else part.replace("<", "\\<") for part in _CODE.split(text))

    def _code(self, word: str, where: str) -> str:
        """A name as code, and as a link where the reference shows it: seen from `where`, from the modules above it, or in full."""
        above = where.split(".")
        for prefix in [*(".".join(above[:n]) for n in range(len(above), 0, -1)), *_ALSO]:
            if (name := f"{prefix}.{word}") in self._known and name != where:
                return f"{{py:obj}}`{word} <{name}>`"
        return f"{{py:obj}}`{word}`" if word in self._known and word != where else f"`{word}`"


def _load(root: Path) -> griffe.ModulesCollection:
    loader = griffe.GriffeLoader(
        search_paths=[root],
        docstring_parser=griffe.Parser.google,
        docstring_options={"returns_named_value": False, "returns_multiple_items": False, "warnings": False},
    )
    for package in PACKAGES:
        loader.load(package)
    loader.resolve_aliases(implicit=False, external=False)
    return loader.modules_collection


def _behind(root: Path, module: str) -> str:
    """The module that a facade hands on."""
    file = root / f"{module.replace('.', '/')}.py"
    facade = _FACADE.search(file.read_text(encoding="utf-8")) if file.exists() else None
    return facade[1] if facade else module


def _heading(item: griffe.Object, name: str) -> tuple[str, str, list[str]]:
    """The directive, its argument and its options."""
    if isinstance(item, griffe.Class):
        if any("Error" in str(base) or "Warning" in str(base) or str(base) == "Exception" for base in item.bases):
            return "exception", name, []
        return "class", f"{name}{_parameters(item.parameters)}", []
    inside = isinstance(item.parent, griffe.Class)
    if isinstance(item, griffe.Function):
        returns = f" -> {item.returns}" if item.returns else ""
        labels = [f":{label}:" for label in ("staticmethod", "classmethod") if label in item.labels]
        return "method" if inside else "function", f"{name}{_parameters(item.parameters)}{returns}", labels
    annotation = item.annotation if isinstance(item, griffe.Attribute) else None
    kind = "property" if "property" in item.labels else "attribute" if inside else "data"
    return kind, name, [f":type: {annotation}"] if annotation else []


def _members(item: griffe.Class) -> list[_Item]:
    found = [member for name, member in item.all_members.items() if not name.startswith("_")]
    found = [member for member in found if member.has_docstring and member.canonical_path.startswith(PACKAGES)]
    return sorted(found, key=lambda member: (member.parent is not item, member.lineno or 0))


def _parameters(parameters: griffe.Parameters) -> str:
    shown: list[str] = []
    kinds = griffe.ParameterKind
    before = None
    for number, one in enumerate(parameters):
        if number == 0 and one.name in ("self", "cls"):
            continue
        if one.kind is kinds.keyword_only and before not in (kinds.keyword_only, kinds.var_positional):
            shown.append("*")
        before = one.kind
        stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(one.kind, "")
        annotation = f": {one.annotation}" if one.annotation else ""
        default = "" if one.default is None or stars else f" = {one.default}" if annotation else f"={one.default}"
        shown.append(f"{stars}{one.name}{annotation}{default}")
    return f"({', '.join(shown)})"


def _require_parameters(item: griffe.Object, told: Sequence[griffe.DocstringParameter]) -> None:
    there = {*item.all_members, *(one.name for one in getattr(item, "parameters", ()))}
    unknown = {name.lstrip("*") for one in told for name in one.name.split(", ")} - there
    if unknown:
        raise ValueError(f"{item.path}: its docstring says what {sorted(unknown)} are, which it does not take")


def _inner(text: str) -> str:
    return indent(text, "        ").strip()


def _fenced(example: str) -> str:
    return f"\n```pycon\n{example.rstrip()}\n```\n"


def _command() -> str:
    """Every verb with its help, as `kvemb VERB --help` prints it."""
    os.environ.update(COLUMNS="96", NO_COLOR="1")
    from kvemb import cli
    from kvemb.commands.verb_options import shard_options

    parser = cli._parser()
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    told = {**verbs.choices, "shard": shard_options()}
    helps = [f"## `kvemb {name}`\n\n```text\n{verb.format_help()}```\n" for name, verb in told.items()]
    return "\n".join([f"```text\n{parser.format_help()}```\n", *helps])
