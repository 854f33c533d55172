//! A suite that any [`ExternalKvStore`] must pass, clause by clause of its contract.
//!
//! Whoever implements a store implements [`Harness`] beside it and calls [`run`]. A breach panics
//! with what was seen. Nothing here measures time; what must happen is waited for with a limit.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Wake, Waker};
use std::time::Duration;

use kv_core::{Digest, Span};

use crate::{
    Cancelling, ChunkKey, ExternalKvStore, Finished, Operation, StoreCompletion, StoreFault,
    StoreRefusal, StoreTicket,
};

/// A completion that takes longer than this never comes.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// Length of most chunks of the suite, bytes; a store must take as much.
pub const CHUNK_BYTES: u32 = 1_000;

/// What the suite needs besides the store.
pub trait Harness {
    /// What is tested.
    type Store: ExternalKvStore;

    /// A fresh and empty store that has room for at least 16 chunks of [`CHUNK_BYTES`], 8 of them
    /// under way.
    fn store(&mut self) -> Self::Store;

    /// Damages a stored chunk; says whether it could.
    fn damage(&mut self, store: &mut Self::Store, key: &ChunkKey) -> bool;

    /// Keeps operations from ending; says whether it can.
    fn hold(&mut self, store: &mut Self::Store) -> bool;

    /// Lets them end.
    fn let_go(&mut self, store: &mut Self::Store);
}

/// Runs every clause.
pub fn run<H: Harness>(harness: &mut H) {
    clause_1_a_refusal_hands_back_what_was_passed(harness);
    clause_2_one_completion_per_ticket(harness);
    clause_3_what_was_put_is_what_is_got(harness);
    clause_3_keys_that_differ_name_different_chunks(harness);
    clause_3_damage_is_never_got(harness);
    clause_4_puts_and_deletes_can_be_repeated(harness);
    clause_6_cancelling_ends_once(harness);
    clause_7_what_is_under_way_is_bounded(harness);
    clause_8_close_accounts_for_everything(harness);
}

/// Counts wake-ups.
#[derive(Debug, Default)]
struct Signal {
    wakes: Mutex<u64>,
    woken: Condvar,
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        *self.wakes.lock().expect("no holder panics") += 1;
        self.woken.notify_all();
    }
}

struct Bench<S> {
    store: S,
    signal: Arc<Signal>,
    ended: Vec<StoreCompletion>,
}

impl<S: ExternalKvStore> Bench<S> {
    fn new<H: Harness<Store = S>>(harness: &mut H) -> Self {
        let mut store = harness.store();
        let signal = Arc::new(Signal::default());
        store.set_waker(Waker::from(Arc::clone(&signal)));
        Self {
            store,
            signal,
            ended: Vec::new(),
        }
    }

    /// Waits, by wake-ups alone, until that operation has ended.
    fn wait(&mut self, ticket: StoreTicket) -> StoreCompletion {
        let mut seen = 0;
        loop {
            self.store.poll(&mut self.ended);
            if let Some(place) = self.ended.iter().position(|ended| ended.ticket == ticket) {
                return self.ended.swap_remove(place);
            }
            let wakes = self.signal.wakes.lock().expect("no holder panics");
            let (wakes, _) = self
                .signal
                .woken
                .wait_timeout_while(wakes, WAIT_MAX, |wakes| *wakes <= seen)
                .expect("no holder panics");
            assert!(
                *wakes > seen,
                "no wake-up although {ticket:?} is unfinished"
            );
            seen = *wakes;
        }
    }

    fn put(&mut self, key: ChunkKey, bytes: &[u8]) -> StoreCompletion {
        let ticket = self.store.put(key, bytes.to_vec()).expect("there is room");
        self.wait(ticket)
    }

    fn get(&mut self, key: ChunkKey) -> StoreCompletion {
        let ticket = self.store.get(key, empty(&key)).expect("there is room");
        self.wait(ticket)
    }

    fn delete(&mut self, key: ChunkKey) -> StoreCompletion {
        let ticket = self.store.delete(key).expect("there is room");
        self.wait(ticket)
    }
}

/// Bytes that differ for every seed.
fn chunk(seed: u32) -> Vec<u8> {
    (0..CHUNK_BYTES)
        .map(|place| (place.wrapping_mul(31) ^ seed).to_le_bytes()[0])
        .collect()
}

fn key(index: u32, bytes: &[u8]) -> ChunkKey {
    ChunkKey {
        namespace: 0x5eed,
        object: 1,
        index,
        layout_fingerprint: 2,
        bytes: u32::try_from(bytes.len()).expect("the suite's chunks are short"),
        digest: Digest::of(bytes),
    }
}

fn empty(key: &ChunkKey) -> Vec<u8> {
    vec![0; usize::try_from(key.bytes).expect("the suite's chunks are short")]
}

/// Clause 1: wrong and too long chunks, and a closed store.
pub fn clause_1_a_refusal_hands_back_what_was_passed<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    let bytes = chunk(1);
    let named = key(0, &bytes);
    let short = bytes[1..].to_vec();
    let why = StoreRefusal::WrongLength {
        expected: CHUNK_BYTES,
        found: short.len(),
    };
    let refused = bench
        .store
        .put(named, short.clone())
        .expect_err("the length is wrong");
    assert_eq!((refused.why, refused.back), (why, short.clone()));
    let refused = bench
        .store
        .get(named, short.clone())
        .expect_err("the length is wrong");
    assert_eq!((refused.why, refused.back), (why, short.clone()));
    let max = bench.store.limits().chunk_bytes_max;
    if let Some(too_large) = max.checked_add(1) {
        let named = ChunkKey {
            bytes: too_large,
            ..named
        };
        let refused = bench
            .store
            .put(named, short.clone())
            .expect_err("the chunk is too long");
        assert_eq!(
            refused.why,
            StoreRefusal::TooLarge {
                bytes: too_large,
                max
            }
        );
        assert_eq!(refused.back, short);
    }
    bench.store.close(Span::from_secs(30));
    let refused = bench
        .store
        .put(named, bytes.clone())
        .expect_err("the store is closed");
    assert_eq!(
        (refused.why, refused.back),
        (StoreRefusal::Closed, bytes.clone())
    );
    let refused = bench
        .store
        .get(named, bytes.clone())
        .expect_err("the store is closed");
    assert_eq!((refused.why, refused.back), (StoreRefusal::Closed, bytes));
    assert_eq!(bench.store.delete(named), Err(StoreRefusal::Closed));
    bench.store.poll(&mut bench.ended);
    assert!(
        bench.ended.is_empty(),
        "a refusal has no completion: {:?}",
        bench.ended
    );
}

/// Clauses 2 and 5: many operations, each ends once and gives its buffer back.
pub fn clause_2_one_completion_per_ticket<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    let mut used = BTreeSet::new();
    for round in 0..16 {
        let bytes = chunk(round);
        let named = key(round % 4, &bytes);
        let put = bench
            .store
            .put(named, bytes.clone())
            .expect("there is room");
        let ended = bench.wait(put);
        assert_eq!((ended.operation, ended.key), (Operation::Put, named));
        assert_eq!(ended.result, Ok(Finished::Stored));
        assert_eq!(ended.buffer.map(|buffer| buffer.len()), Some(bytes.len()));
        let gets: Vec<_> = (0..3)
            .map(|_| {
                bench
                    .store
                    .get(named, empty(&named))
                    .expect("there is room")
            })
            .collect();
        for &get in gets.iter().rev() {
            let ended = bench.wait(get);
            assert_eq!(
                (ended.operation, ended.result),
                (Operation::Get, Ok(Finished::Got))
            );
            assert_eq!(ended.buffer.as_deref(), Some(&bytes[..]));
        }
        let delete = bench.store.delete(named).expect("there is room");
        assert_eq!(bench.wait(delete).operation, Operation::Delete);
        for ticket in gets.into_iter().chain([put, delete]) {
            assert!(used.insert(ticket), "{ticket:?} was used twice");
        }
    }
    bench.store.close(Span::from_secs(30));
    bench.store.poll(&mut bench.ended);
    assert!(bench.ended.is_empty(), "ended twice: {:?}", bench.ended);
}

/// Clause 3: the bytes, and what is not there.
pub fn clause_3_what_was_put_is_what_is_got<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    let absent = key(9, &chunk(9));
    let ended = bench.get(absent);
    assert_eq!(ended.result, Err(StoreFault::NotFound));
    assert!(
        ended.buffer.is_some(),
        "a buffer that nobody touches comes back"
    );
    let one_byte = vec![7];
    for bytes in [chunk(1), one_byte] {
        let named = key(0, &bytes);
        assert_eq!(bench.put(named, &bytes).result, Ok(Finished::Stored));
        let ended = bench.get(named);
        assert_eq!(ended.result, Ok(Finished::Got));
        assert_eq!(ended.buffer, Some(bytes));
    }
}

/// Clause 3: no field of a key is ignored.
pub fn clause_3_keys_that_differ_name_different_chunks<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    let bytes = chunk(1);
    let named = key(0, &bytes);
    assert_eq!(bench.put(named, &bytes).result, Ok(Finished::Stored));
    let others = [
        ChunkKey {
            namespace: named.namespace ^ (1 << 127),
            ..named
        },
        ChunkKey {
            object: named.object ^ (1 << 63),
            ..named
        },
        ChunkKey {
            index: named.index ^ (1 << 31),
            ..named
        },
        ChunkKey {
            layout_fingerprint: named.layout_fingerprint ^ (1 << 63),
            ..named
        },
        ChunkKey {
            bytes: named.bytes - 1,
            ..named
        },
        ChunkKey {
            digest: Digest::from_value(named.digest.value() ^ (1 << 63)),
            ..named
        },
    ];
    for other in others {
        assert_eq!(
            bench.get(other).result,
            Err(StoreFault::NotFound),
            "{other:?}"
        );
        assert_eq!(bench.delete(other).result, Ok(Finished::Deleted));
    }
    assert_eq!(
        bench.get(named).result,
        Ok(Finished::Got),
        "another key's chunk was deleted"
    );
}

/// Clause 3: damage is named, and a chunk that is stored again is sound again.
pub fn clause_3_damage_is_never_got<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    let bytes = chunk(1);
    let named = key(0, &bytes);
    bench.put(named, &bytes);
    if harness.damage(&mut bench.store, &named) {
        assert_eq!(bench.get(named).result, Err(StoreFault::Corrupt));
    }
    assert_eq!(bench.put(named, &bytes).result, Ok(Finished::Stored));
    assert_eq!(bench.get(named).buffer, Some(bytes));
}

/// Clause 4: repeating changes nothing.
pub fn clause_4_puts_and_deletes_can_be_repeated<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    let bytes = chunk(1);
    let named = key(0, &bytes);
    for _ in 0..40 {
        assert_eq!(
            bench.put(named, &bytes).result,
            Ok(Finished::Stored),
            "takes room twice"
        );
    }
    assert_eq!(bench.get(named).buffer, Some(bytes));
    for _ in 0..3 {
        assert_eq!(bench.delete(named).result, Ok(Finished::Deleted));
        assert_eq!(bench.get(named).result, Err(StoreFault::NotFound));
    }
}

/// Clause 6: whenever it comes, there is one end.
pub fn clause_6_cancelling_ends_once<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    let bytes = chunk(1);
    let named = key(0, &bytes);
    let held = harness.hold(&mut bench.store);
    let ticket = bench
        .store
        .put(named, bytes.clone())
        .expect("there is room");
    let answer = bench.store.cancel(ticket);
    if held {
        assert_eq!(answer, Cancelling::Requested, "it had not ended");
    }
    harness.let_go(&mut bench.store);
    let ended = bench.wait(ticket);
    match ended.result {
        Ok(Finished::Stored) => assert_eq!(bench.get(named).result, Ok(Finished::Got)),
        Err(StoreFault::Cancelled) => {
            assert_eq!(answer, Cancelling::Requested);
            assert_eq!(
                ended.buffer,
                Some(bytes),
                "a cancelled put gives its bytes back"
            );
            assert_eq!(
                bench.get(named).result,
                Err(StoreFault::NotFound),
                "it had an effect"
            );
        }
        other => unreachable!("a cancelled put ended as {other:?}"),
    }
    assert_eq!(
        bench.store.cancel(ticket),
        Cancelling::TooLate,
        "it ended before"
    );
    bench.store.poll(&mut bench.ended);
    assert!(bench.ended.is_empty(), "ended twice: {:?}", bench.ended);
}

/// Clause 7: the store says that it is busy before it has more than it said, and goes on
/// afterwards.
pub fn clause_7_what_is_under_way_is_bounded<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    if !harness.hold(&mut bench.store) {
        return;
    }
    let limits = bench.store.limits();
    let bytes = chunk(1);
    let named = key(0, &bytes);
    let mut tickets = Vec::new();
    let refused = loop {
        match bench.store.get(named, bytes.clone()) {
            Ok(ticket) => tickets.push(ticket),
            Err(refused) => break refused,
        }
        let bytes_under_way = tickets.len() as u64 * u64::from(CHUNK_BYTES);
        assert!(
            tickets.len() as u64 <= u64::from(limits.operations_max),
            "too many operations"
        );
        assert!(
            bytes_under_way <= limits.inflight_bytes_max,
            "too many bytes"
        );
    };
    assert_eq!((refused.why, refused.back), (StoreRefusal::Busy, bytes));
    harness.let_go(&mut bench.store);
    for ticket in tickets {
        bench.wait(ticket);
    }
    assert_eq!(
        bench.get(named).result,
        Err(StoreFault::NotFound),
        "it goes on"
    );
}

/// Clause 8: every operation has ended or is counted, and closing can be repeated.
pub fn clause_8_close_accounts_for_everything<H: Harness>(harness: &mut H) {
    let mut bench = Bench::new(harness);
    let bytes = chunk(1);
    harness.hold(&mut bench.store);
    let mut open: BTreeSet<_> = (0..4)
        .map(|index| {
            bench
                .store
                .put(key(index, &bytes), bytes.clone())
                .expect("there is room")
        })
        .collect();
    let closed = bench.store.close(Span::from_millis(5));
    bench.store.poll(&mut bench.ended);
    for ended in bench.ended.drain(..) {
        assert!(open.remove(&ended.ticket), "{:?} ended twice", ended.ticket);
        assert!(
            ended.buffer.is_some() || ended.result == Err(StoreFault::Unknown),
            "{ended:?}"
        );
    }
    assert_eq!(
        u64::from(closed.unconfirmed),
        open.len() as u64,
        "unconfirmed operations"
    );
    assert_eq!(
        closed.leaked_bytes,
        open.len() as u64 * u64::from(CHUNK_BYTES)
    );
    assert_eq!(
        bench.store.close(Span::ZERO),
        closed,
        "closing again says something else"
    );
}
