"""Faults of keys and certificates: of this process's own files, and of those that shards and nodes show.

The latter are examined by handshakes of our own, since gRPC and storage clients tell only that a connection was closed.
"""

import os
import stat
import time
from collections.abc import Iterator

from kvemb.config import Config
from kvemb.net.deadline import Deadline
from kvemb.net.name_lookup import is_loopback
from kvemb.net.tls_config import TlsConfig
from kvemb.net.tls_probe import SeenCertificate, look_at, look_at_own
from kvemb.operate.findings import UNUSABLE, Finding, error, warning
from kvemb.protocol.roles import caller_of

LEAST_DAYS = 14
_DAY_S = 86_400.0
_OF_OTHERS = stat.S_IROTH | stat.S_IWOTH
_RENEW = "Issue another one and replace the file in one step (mv); no process need be restarted (docs/security.md)."


def judge_certificates(config: Config, timeout_s: float, now_s: float | None = None) -> Iterator[Finding]:
    """Yield the faults of every key and certificate that can be seen from here."""
    at_s = time.time() if now_s is None else now_s
    sections = (
        ("parameter_servers", config.servers.tls, config.servers.insecure, "shard", config.servers.shards),
        ("storage", config.storage.tls, config.storage.insecure, "node", config.storage.nodes),
    )
    for section, tls, insecure, who, addresses in sections:
        at = f"{section}.tls"
        if tls is None:
            yield from _judge_plain_text(section, insecure, addresses)
            continue
        own = list(_judge_own(tls, at, config.cluster if who == "shard" else "", at_s))
        yield from own
        if any(one.name == UNUSABLE for one in own):
            continue  # no server can be asked with them
        for index, address in enumerate(addresses):
            where = f"node {address}" if who == "node" else f"shard {index} ({address})"
            yield from _judge(look_at(address, tls, Deadline.after(timeout_s)), where, at, at_s, "serverAuth")


def _judge_plain_text(section: str, insecure: bool, addresses: tuple[str, ...]) -> Iterator[Finding]:
    beyond = [address for address in addresses if not is_loopback(address)]
    if beyond and not insecure:
        what = f"{section}.tls is missing, and {beyond[0]} is not an address of this machine's own: shards and trainers refuse to start"
        mend = f"Give {section}.tls, or {section}.insecure: true on a network that nothing else reaches (docs/security.md)."
        yield error("not-encrypted", section, what, mend)
    elif beyond:
        what = f"{section}.insecure is true: a reader of the network to {beyond[0]} reads rows and gradients, and may change them"
        yield warning("not-encrypted", section, what, f"Give {section}.tls, and take insecure out (docs/security.md).")


def _judge_own(tls: TlsConfig, at: str, cluster: str, now_s: float) -> Iterator[Finding]:
    for name in ("key", "token_file"):
        path = getattr(tls, name)
        mode = os.stat(path).st_mode if path is not None and os.path.exists(path) else 0
        if mode & _OF_OTHERS:
            what = f"{at}.{name} may be read by every user of this machine (mode {stat.S_IMODE(mode):o})"
            yield error("key-readable", path, what, f"chmod 600 {path}, and renew it: it may have been read.")
    if not tls.own:
        return
    seen, where = look_at_own(tls), str(tls.cert)
    yield from _judge(seen, where, at, now_s, "clientAuth")
    if cluster and not seen.fault and not caller_of(seen.uris, cluster).grants:
        what = f"says {', '.join(seen.uris) or 'no URI'}, expected kvemb://{cluster}/trainer/NAME, admin or reader"
        yield error("certificate-name", where, what, "Issue one with that name among its URIs (docs/security.md).")


def _judge(seen: SeenCertificate, where: str, at: str, now_s: float, purpose: str) -> Iterator[Finding]:
    left_s = seen.ends_s - now_s
    if seen.fault:
        yield from _judge_fault(seen, where, at, purpose)
    elif seen.ends and left_s < LEAST_DAYS * _DAY_S:
        yield warning("certificate-ends", where, f"its certificate ends in {left_s / _DAY_S:.1f} days ({seen.ends})", _RENEW)


def _judge_fault(seen: SeenCertificate, where: str, at: str, purpose: str) -> Iterator[Finding]:
    what = f"its certificate is not good: {seen.why}"
    match seen.fault:
        case "expired":
            yield error("certificate-expired", where, what, _RENEW)
        case "not yet valid":
            yield error("certificate-expired", where, what, "Set the clocks: of this machine, or of the one that issued it.")
        case "names":
            yield error("certificate-name", where, what, "Issue one with this host name or address among its names.")
        case "purpose":
            yield error("certificate-purpose", where, what, f"Issue one with extendedKeyUsage {purpose}.")
        case "untrusted":
            mend = f"Put the authority that signed it into {at}.ca, or issue one by that of {at}.ca."
            yield error("certificate-untrusted", where, what, mend)
        case "no tls":
            yield error("tls-refused", where, f"no TLS: {seen.why}", "See that it speaks TLS at this port, and that the address is right.")
        case "files":
            what, mend = f"{at}: cannot be used: {seen.why}", f"See that {at}.ca, cert and key can be read, and the last two are a pair."
            yield error(UNUSABLE, where, what, mend)
        # "nobody" (no connection): the checks that ask the server for more report it
