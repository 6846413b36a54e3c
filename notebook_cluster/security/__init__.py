"""Who may talk to whom: private files, key pairs, CURVE with ZAP, same-user trust, pairing, safe output.

May import: ``protocol``. Called by: ``link``, ``discovery``, ``mesh`` and every room above them.

- :mod:`.identity`: the CURVE key pair of an installation or agent, the folders of this user, how a private file is
  written; keys of the same user on this machine, through 0600 files
- :mod:`.trust`: keys of other people and machines that were paired
- :mod:`.codes`: short codes, how few wrong ones are allowed, and SPAKE2 with such a code
- :mod:`.curve`: CURVE on a socket and the ZAP handler that decides which keys come in
- :mod:`.sanitise`: the MIME allow-list for what nodes print and display
- :mod:`.chart_grammar`: the allow-list for charts that nodes display, a walk over the words of :mod:`.chart_words`;
  :mod:`.vega_charts` with :mod:`.vega_expressions`, and :mod:`.plotly_charts`
- :mod:`.widgets`: the allow-list for widgets that nodes create, with :mod:`.widget_checks` of their traits
"""

from notebook_cluster.security.codes import OpenCode, new_code, read_code
from notebook_cluster.security.curve import Gate, dial, serve, user_id
from notebook_cluster.security.identity import (
    CannotWrite,
    Identity,
    agent_directory,
    announce,
    cluster_directory,
    data_directory,
    fingerprint,
    in_words,
    is_key,
    load_identity,
    new_identity,
    own_key,
    private_directory,
    private_socket_directory,
    runtime_directory,
    same_user_keys,
    withdraw,
    without_tokens,
    write_private,
)
from notebook_cluster.security.sanitise import WidgetView, safe_bundle, safe_output
from notebook_cluster.security.trust import KeyChanged, Trusted, TrustStore, owner, trusted_coordinators, trusted_peers

__all__ = [
    "CannotWrite",
    "Gate",
    "Identity",
    "KeyChanged",
    "OpenCode",
    "TrustStore",
    "Trusted",
    "WidgetView",
    "agent_directory",
    "announce",
    "cluster_directory",
    "data_directory",
    "dial",
    "fingerprint",
    "in_words",
    "is_key",
    "load_identity",
    "new_code",
    "new_identity",
    "own_key",
    "owner",
    "private_directory",
    "private_socket_directory",
    "read_code",
    "runtime_directory",
    "safe_bundle",
    "safe_output",
    "same_user_keys",
    "serve",
    "trusted_coordinators",
    "trusted_peers",
    "user_id",
    "withdraw",
    "without_tokens",
    "write_private",
]
