//! The suite over the store in memory, and what is peculiar to it.

use kv_core::Digest;
use kv_store_ext::conformance::{self, CHUNK_BYTES, Harness};
use kv_store_ext::{ChunkKey, ExternalKvStore, Finished, MemoryStore, StoreFault, StoreLimits};

struct InMemory {
    limits: StoreLimits,
}

impl Harness for InMemory {
    type Store = MemoryStore;

    fn store(&mut self) -> MemoryStore {
        MemoryStore::new(self.limits, 16 * u64::from(CHUNK_BYTES))
    }

    fn damage(&mut self, store: &mut MemoryStore, key: &ChunkKey) -> bool {
        store.flip_bit(key, 1_234)
    }

    fn hold(&mut self, store: &mut MemoryStore) -> bool {
        store.hold();
        true
    }

    fn let_go(&mut self, store: &mut MemoryStore) {
        store.let_go();
    }
}

const LIMITS: StoreLimits = StoreLimits {
    chunk_bytes_max: CHUNK_BYTES,
    operations_max: 8,
    inflight_bytes_max: 1 << 20,
};

#[test]
fn the_store_in_memory_honours_the_contract() {
    conformance::run(&mut InMemory { limits: LIMITS });
}

#[test]
fn the_store_in_memory_honours_the_contract_when_bytes_are_short() {
    let inflight_bytes_max = 8 * u64::from(CHUNK_BYTES) + 1;
    conformance::run(&mut InMemory {
        limits: StoreLimits {
            operations_max: 1_000,
            inflight_bytes_max,
            ..LIMITS
        },
    });
}

#[test]
fn a_full_store_says_so_and_deleting_makes_room() {
    let mut store = MemoryStore::new(LIMITS, 10);
    let key = |index, bytes: &[u8]| ChunkKey {
        namespace: 0,
        object: 0,
        index,
        layout_fingerprint: 0,
        bytes: u32::try_from(bytes.len()).unwrap(),
        digest: Digest::of(bytes),
    };
    let (first, second) = ([1; 6], [2; 5]);
    let last = |store: &mut MemoryStore| {
        let mut ended = Vec::new();
        store.poll(&mut ended);
        ended.pop().unwrap().result
    };
    store.put(key(0, &first), first.to_vec()).unwrap();
    assert_eq!(last(&mut store), Ok(Finished::Stored));
    store.put(key(1, &second), second.to_vec()).unwrap();
    assert_eq!(last(&mut store), Err(StoreFault::Full));
    assert_eq!(store.used_bytes(), 6);
    store.delete(key(0, &first)).unwrap();
    assert_eq!(last(&mut store), Ok(Finished::Deleted));
    store.put(key(1, &second), second.to_vec()).unwrap();
    assert_eq!(last(&mut store), Ok(Finished::Stored));
    assert_eq!(store.used_bytes(), 5);
}
