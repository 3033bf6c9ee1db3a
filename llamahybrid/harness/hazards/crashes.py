"""Arguments and blobs that end the whole process where an error would do."""

from __future__ import annotations

import struct

from llama_cpp import llama_cpp as lib

from llamahybrid.harness.hazards.case import probe
from llamahybrid.harness.hazards.context import ON_DEVICE, PARTIAL, THREE, TWO, Context, after_failure
from llamahybrid.harness.hazards.effect import Effect, NotApplicable, refused, went_on, wrong
from llamahybrid.harness.hazards.model import ModelUnderTest
from llamahybrid.harness.hazards.process import memory_left

_DEVICE = PARTIAL | ON_DEVICE
_HEADER = struct.calcsize("<Ii")  # magic, sequence


def _offered(context: Context, blob: bytes, seq: int, flags: int, length: int) -> Effect:
    """Offer a blob that no sound library takes, then go on at `length`, the live state's end."""
    if context.load(blob, seq, flags):
        return wrong("the restore returned success")
    return after_failure(context, length)


@probe("ON_DEVICE blob without the magic", "llama_context::state_seq_set_data")
def on_device_magic(tested: ModelUnderTest) -> Effect:
    """Save on the device, restore 64 zero bytes with ON_DEVICE."""
    tested.need("recurrent")
    context = tested.context().grown(12)
    context.save(flags=_DEVICE)
    return _offered(context, b"\0" * 64, 0, _DEVICE, 12)


@probe("ON_DEVICE blob of another context", "llama_context::state_seq_set_data")
def on_device_other_context(tested: ModelUnderTest) -> Effect:
    """Save on the device in one context, restore in another that never saved, and again once it has."""
    tested.need("recurrent")
    blob = tested.context().grown(12).save(flags=_DEVICE)
    context = tested.context().grown(12)
    if context.load(blob, flags=_DEVICE):
        return wrong("the restore returned success")
    context.save(flags=_DEVICE)
    return _offered(context, blob, 0, _DEVICE, 12)


@probe("ON_DEVICE blobs, PARTIAL and full mixed", "llama_io_read_device::~llama_io_read_device")
def on_device_flags(tested: ModelUnderTest) -> Effect:
    """Save PARTIAL, then full, on the device; restore the PARTIAL blob, then the full one as PARTIAL."""
    tested.need("hybrid")
    context = tested.context().grown(12)
    part = context.save(flags=_DEVICE)
    full = context.save(flags=ON_DEVICE)
    if context.load(part, flags=_DEVICE):
        return wrong("the restore returned success")
    return _offered(context, full, 0, _DEVICE, 12)


@probe("ON_DEVICE blob with trailing bytes", "llama_io_read_device::~llama_io_read_device")
def on_device_trailing(tested: ModelUnderTest) -> Effect:
    """Save on the device, restore the blob with four more bytes."""
    tested.need("recurrent")
    context = tested.context().grown(12)
    return _offered(context, context.save(flags=_DEVICE) + b"\0" * 4, 0, _DEVICE, 12)


@probe("Saving all sequences ON_DEVICE from several cell ranges", "llama_memory_recurrent::state_write")
def on_device_all(tested: ModelUnderTest) -> Effect:
    """Three unified sequences, the middle one removed; save sequence -1 on the device; go on with one."""
    tested.need("recurrent")
    context = tested.context(**THREE).filled({0: 8, 1: 8, 2: 8})
    context.rm(1, -1, -1)
    size = len(context.save(-1, _DEVICE))
    return refused(context.goes_on(8), f"{size} bytes were saved")


@probe("No memory for an ON_DEVICE save", "llama_io_write_device::~llama_io_write_device")
def on_device_no_memory(tested: ModelUnderTest) -> Effect:
    """Save 4,000 tokens on the device with no memory left to the process; go on."""
    tested.need("attention")
    tested.need_memory_limit()
    context = tested.context(n_ctx=4096, n_batch=4096).grown(4000, chunk=4000)
    with memory_left(0):
        saved = context.save(flags=ON_DEVICE)
    if saved:
        raise NotApplicable("the allocation did not fail")
    return refused(context.goes_on(4000), "0 bytes were saved")


@probe("A blob with two recurrent cells for one sequence", "llama_memory_recurrent::state_read_meta")
def two_recurrent_cells(tested: ModelUnderTest) -> Effect:
    """Put a second cell into a PARTIAL snapshot and restore it where two sequences fit."""
    tested.need("recurrent")
    context = tested.context(n_seq_max=2).grown(12)
    blob = bytearray(context.save(flags=PARTIAL))
    if len(blob) < _HEADER + 12 or struct.unpack_from("<I", blob, _HEADER) != (1,):
        raise NotApplicable("the snapshot does not start with one recurrent cell")
    struct.pack_into("<I", blob, _HEADER, 2)
    blob[_HEADER + 12 : _HEADER + 12] = struct.pack("<iI", 99, 0)
    return _offered(context, bytes(blob), 0, PARTIAL, 12)


@probe("An empty snapshot for a sequence beyond n_seq_max, with planes", "llama_memory_recurrent::set_rs_idx")
def empty_state_far_sequence(tested: ModelUnderTest) -> Effect:
    """Two sequences, planes; restore the snapshot of an empty one into sequence 5; then decode."""
    context = tested.with_planes(2, **TWO)
    return _offered(context, context.save(flags=PARTIAL), 5, PARTIAL, 0)


@probe("A state for sequence 300", "llama_kv_cache::state_read_sinfo")
def state_far_sequence(tested: ModelUnderTest) -> Effect:
    """Restore the state of twelve tokens into sequence 300; go on with the first."""
    context = tested.context().grown(12)
    return _offered(context, context.save(), 300, 0, 12)


@probe("Copying to sequence 300", "llama_kv_cache::seq_cp")
def copy_far_sequence(tested: ModelUnderTest) -> Effect:
    """Twelve tokens; seq_cp to sequence 300; seq_keep of sequence -3; go on with the first."""
    context = tested.context().grown(12)
    context.cp(0, 300)
    lib.llama_memory_seq_keep(context.memory, -3)
    said = f"the sequence ends at position {context.last()}"
    return refused(context.goes_on(12), said)


@probe("seq_pos_min and seq_pos_max of sequence -1", "llama_kv_cache::seq_pos_max")
def position_of_no_sequence(tested: ModelUnderTest) -> Effect:
    """Twelve tokens; ask for the first and last position of sequence -1; go on."""
    context = tested.context().grown(12)
    ends = context.first(-1), context.last(-1)
    said = f"it returned {ends}"
    return refused(context.goes_on(12), said) if ends == (-1, -1) else wrong(said)


@probe("Ubatches no larger than the rollback planes", "llama_batch_allocr::split_equal")
def small_ubatch(tested: ModelUnderTest) -> Effect:
    """Eight planes, n_ubatch = 9; decode twelve tokens and go on; where that is refused, n_ubatch = 10."""
    tested.with_planes(8)
    try:
        context, said = tested.with_planes(8, n_ubatch=9, n_batch=64), "n_ubatch = 9: decoded"
    except RuntimeError as error:
        context, said = tested.with_planes(8, n_ubatch=10, n_batch=64), f"n_ubatch = 9: {error}; 10: decoded"
    return went_on(context.grown(12).goes_on(12), said)
