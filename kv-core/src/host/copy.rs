//! One block at a time between the pool in plain memory and the bytes of a slot.
//!
//! Both backends copy through these functions, so that they can't differ in what a copy means.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

use super::PlainMemory;
use crate::{BlockId, Command, Completion, CopyFault, Digest, DigestWork, Layout, Outcome, Time};

/// Bytes of one slot, all zero. Pages are taken from the system when first touched.
pub(crate) fn empty_slot(layout: &Layout) -> Box<[u8]> {
    let bytes = usize::try_from(layout.block_bytes()).expect("a block fits into the address space");
    vec![0u8; bytes].into_boxed_slice()
}

/// Copies a block into a slot. `index` is the place among the command's moves.
pub(crate) fn out(
    memory: &PlainMemory,
    index: usize,
    block: BlockId,
    slot: &mut [u8],
) -> Result<(), CopyFault> {
    let block = memory.read(block).ok_or_else(|| CopyFault::BlockBusy {
        index: number(index),
    })?;
    slot.copy_from_slice(block.bytes());
    Ok(())
}

/// Copies a slot into a block. `index` is the place among the command's moves.
pub(crate) fn back_in(
    memory: &PlainMemory,
    index: usize,
    block: BlockId,
    slot: &[u8],
) -> Result<(), CopyFault> {
    let mut block = memory.write(block).ok_or_else(|| CopyFault::BlockBusy {
        index: number(index),
    })?;
    block.bytes_mut().copy_from_slice(slot);
    Ok(())
}

/// Compares a slot with the digest that the command carries for it, if it carries one.
pub(crate) fn verify(work: &DigestWork, index: usize, slot: &[u8]) -> Result<(), CopyFault> {
    match work {
        DigestWork::Verify(expected) if expected[index] != Digest::of(slot) => {
            Err(CopyFault::DigestMismatch {
                index: number(index),
            })
        }
        DigestWork::Compute | DigestWork::Skip | DigestWork::Verify(_) => Ok(()),
    }
}

/// A place among the moves of a command, as faults carry it.
pub(crate) fn number(index: usize) -> u32 {
    u32::try_from(index).expect("a command has fewer moves than the pool has blocks")
}

/// Asserts what the machine promises about every command.
///
/// # Panics
///
/// If the command names a block that is not in the pool, a wrong number of bytes or of digests.
pub(crate) fn check(layout: &Layout, command: &Command) {
    let moves = command.moves().len() as u64;
    assert!(moves > 0, "{:?} moves nothing", command.id());
    assert_eq!(
        command.bytes(),
        moves * layout.block_bytes(),
        "bytes of {:?}",
        command.id()
    );
    for step in command.moves() {
        assert!(
            step.block.value() < layout.blocks(),
            "{:?} of a pool of {} blocks",
            step.block,
            layout.blocks()
        );
    }
    if let DigestWork::Verify(expected) = command.digest() {
        assert_eq!(
            expected.len() as u64,
            moves,
            "digests of {:?}",
            command.id()
        );
    }
}

/// Reports a copy that is surely over: `Done` with its digests, or `Failed` with the reason.
pub(crate) fn completion(
    command: &Command,
    submitted_at: Time,
    completed_at: Time,
    result: Result<Vec<Digest>, CopyFault>,
) -> Completion {
    let (outcome, fault, bytes, digests) = match result {
        Ok(digests) => (Outcome::Done, None, command.bytes(), digests),
        Err(fault) => (Outcome::Failed, Some(fault), 0, Vec::new()),
    };
    Completion {
        id: command.id(),
        outcome,
        fault,
        bytes,
        submitted_at,
        completed_at,
        digests,
    }
}
