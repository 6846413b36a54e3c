"""What pseudo-gradients look like on the wire: flat float32 arrays to bytes and back. Pure numpy, no sockets, no state.

A codec cuts a vector into blocks of ``block`` elements; each block is one record of bytes, so any run of whole blocks
is a contiguous range of the encoded bytes and can be sent, summed and encoded by one owner. Error feedback of lossy
codecs is the caller's: ``residual = a - decode(encode(a))``. :mod:`.torch_encoding` has some codecs in torch, for
vectors on a GPU; it alone needs torch, when it is called.

May import: protocol, memory. Called by: ``training``, ``rounds``.
"""

from notebook_cluster.codecs.codec import Buffer, Codec, DamagedError, Memory, NotFiniteError, Vector, check_finite
from notebook_cluster.codecs.dense import Float32, from_bfloat16, to_bfloat16
from notebook_cluster.codecs.registry import CHUNKED_NAMES, CODEC_NAMES, SPARSE_NAMES, codec_name, get_codec
from notebook_cluster.codecs.torch_encoding import encode as encode_tensor
from notebook_cluster.codecs.torch_encoding import has_form as has_tensor_form
from notebook_cluster.codecs.wire_format import WireFormat

__all__ = [
    "CHUNKED_NAMES",
    "CODEC_NAMES",
    "SPARSE_NAMES",
    "Buffer",
    "Codec",
    "DamagedError",
    "Float32",
    "Memory",
    "NotFiniteError",
    "Vector",
    "WireFormat",
    "check_finite",
    "codec_name",
    "encode_tensor",
    "from_bfloat16",
    "get_codec",
    "has_tensor_form",
    "to_bfloat16",
]
