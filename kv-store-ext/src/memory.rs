//! A store in memory, for the suite and for tests of whoever uses a store.

use std::collections::{BTreeMap, VecDeque};
use std::task::Waker;

use kv_core::{Digest, Refused, Span};

use crate::{
    Cancelling, ChunkKey, ExternalKvStore, Finished, Operation, StoreClosed, StoreCompletion,
    StoreFault, StoreLimits, StoreRefusal, StoreTicket,
};

type EncodedKey = [u8; ChunkKey::ENCODED_BYTES];

/// Keeps chunks in this process. Operations end at once, or, while it is held, when it is let go.
#[derive(Debug)]
pub struct MemoryStore {
    limits: StoreLimits,
    capacity_bytes: u64,
    used_bytes: u64,
    chunks: BTreeMap<EncodedKey, Vec<u8>>,
    pending: VecDeque<Pending>,
    completions: Vec<StoreCompletion>,
    next_ticket: u64,
    waker: Option<Waker>,
    pace: Pace,
    closed: bool,
}

#[derive(Debug)]
struct Pending {
    ticket: StoreTicket,
    operation: Operation,
    key: ChunkKey,
    buffer: Option<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    AtOnce,
    Held,
}

impl MemoryStore {
    /// An empty store of that capacity.
    #[must_use]
    pub const fn new(limits: StoreLimits, capacity_bytes: u64) -> Self {
        Self {
            limits,
            capacity_bytes,
            used_bytes: 0,
            chunks: BTreeMap::new(),
            pending: VecDeque::new(),
            completions: Vec::new(),
            next_ticket: 1,
            waker: None,
            pace: Pace::AtOnce,
            closed: false,
        }
    }

    /// Bytes of all chunks.
    #[must_use]
    pub const fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Lets no operation end until [`let_go`](Self::let_go).
    pub const fn hold(&mut self) {
        self.pace = Pace::Held;
    }

    /// Ends all operations, oldest first, and holds no more.
    pub fn let_go(&mut self) {
        self.pace = Pace::AtOnce;
        self.run();
    }

    /// Damages one bit of a chunk; says whether there is such a chunk.
    pub fn flip_bit(&mut self, key: &ChunkKey, bit: usize) -> bool {
        let Some(chunk) = self.chunks.get_mut(&key.to_bytes()) else {
            return false;
        };
        chunk[bit / 8] ^= 1 << (bit % 8);
        true
    }

    /// Why an operation with a buffer of that length can't be taken.
    fn refusal(&self, key: &ChunkKey, buffer: Option<usize>) -> Option<StoreRefusal> {
        if self.closed {
            return Some(StoreRefusal::Closed);
        }
        if let Some(found) = buffer {
            let (expected, max) = (key.bytes, self.limits.chunk_bytes_max);
            if expected > max {
                return Some(StoreRefusal::TooLarge {
                    bytes: expected,
                    max,
                });
            }
            if usize::try_from(expected) != Ok(found) {
                return Some(StoreRefusal::WrongLength { expected, found });
            }
        }
        let inflight = self
            .pending
            .iter()
            .filter_map(|pending| pending.buffer.as_ref());
        let inflight_bytes: u64 = inflight.map(|buffer| buffer.len() as u64).sum();
        let more_bytes = buffer.map_or(0, |bytes| bytes as u64);
        let busy = self.pending.len() as u64 >= u64::from(self.limits.operations_max)
            || inflight_bytes + more_bytes > self.limits.inflight_bytes_max;
        busy.then_some(StoreRefusal::Busy)
    }

    fn enqueue(
        &mut self,
        operation: Operation,
        key: ChunkKey,
        buffer: Option<Vec<u8>>,
    ) -> StoreTicket {
        let ticket = StoreTicket::new(self.next_ticket);
        self.next_ticket += 1;
        self.pending.push_back(Pending {
            ticket,
            operation,
            key,
            buffer,
        });
        if self.pace == Pace::AtOnce {
            self.run();
        }
        ticket
    }

    fn run(&mut self) {
        while let Some(mut pending) = self.pending.pop_front() {
            let result = self.perform(&mut pending);
            self.end(pending, result);
        }
    }

    fn perform(&mut self, pending: &mut Pending) -> Result<Finished, StoreFault> {
        let name = pending.key.to_bytes();
        match (pending.operation, &mut pending.buffer) {
            (Operation::Put, Some(bytes)) => {
                let len = bytes.len() as u64;
                if !self.chunks.contains_key(&name) {
                    if self.used_bytes + len > self.capacity_bytes {
                        return Err(StoreFault::Full);
                    }
                    self.used_bytes += len;
                }
                // Stored again even if it is there: what is there may be damaged by now.
                self.chunks.insert(name, bytes.clone());
                Ok(Finished::Stored)
            }
            (Operation::Get, Some(buffer)) => {
                let chunk = self.chunks.get(&name).ok_or(StoreFault::NotFound)?;
                if Digest::of(chunk) != pending.key.digest {
                    return Err(StoreFault::Corrupt);
                }
                buffer.copy_from_slice(chunk);
                Ok(Finished::Got)
            }
            (Operation::Delete, _) => {
                if let Some(chunk) = self.chunks.remove(&name) {
                    self.used_bytes -= chunk.len() as u64;
                }
                Ok(Finished::Deleted)
            }
            (Operation::Put | Operation::Get, None) => {
                unreachable!("puts and gets are queued with their buffer")
            }
        }
    }

    fn end(&mut self, pending: Pending, result: Result<Finished, StoreFault>) {
        let Pending {
            ticket,
            operation,
            key,
            buffer,
        } = pending;
        self.completions.push(StoreCompletion {
            ticket,
            operation,
            key,
            result,
            buffer,
        });
        if let Some(waker) = &self.waker {
            waker.wake_by_ref();
        }
    }
}

impl ExternalKvStore for MemoryStore {
    fn limits(&self) -> StoreLimits {
        self.limits
    }

    fn put(
        &mut self,
        key: ChunkKey,
        bytes: Vec<u8>,
    ) -> Result<StoreTicket, Refused<Vec<u8>, StoreRefusal>> {
        match self.refusal(&key, Some(bytes.len())) {
            Some(why) => Err(Refused { why, back: bytes }),
            None => Ok(self.enqueue(Operation::Put, key, Some(bytes))),
        }
    }

    fn get(
        &mut self,
        key: ChunkKey,
        buffer: Vec<u8>,
    ) -> Result<StoreTicket, Refused<Vec<u8>, StoreRefusal>> {
        match self.refusal(&key, Some(buffer.len())) {
            Some(why) => Err(Refused { why, back: buffer }),
            None => Ok(self.enqueue(Operation::Get, key, Some(buffer))),
        }
    }

    fn delete(&mut self, key: ChunkKey) -> Result<StoreTicket, StoreRefusal> {
        match self.refusal(&key, None) {
            Some(why) => Err(why),
            None => Ok(self.enqueue(Operation::Delete, key, None)),
        }
    }

    fn poll(&mut self, out: &mut Vec<StoreCompletion>) {
        out.append(&mut self.completions);
    }

    fn set_waker(&mut self, waker: Waker) {
        self.waker = Some(waker);
    }

    fn cancel(&mut self, ticket: StoreTicket) -> Cancelling {
        let place = self
            .pending
            .iter()
            .position(|pending| pending.ticket == ticket);
        let Some(pending) = place.and_then(|place| self.pending.remove(place)) else {
            return Cancelling::TooLate;
        };
        self.end(pending, Err(StoreFault::Cancelled));
        Cancelling::Requested
    }

    fn close(&mut self, _limit: Span) -> StoreClosed {
        self.closed = true;
        while let Some(pending) = self.pending.pop_front() {
            self.end(pending, Err(StoreFault::Closed));
        }
        StoreClosed::default()
    }
}
