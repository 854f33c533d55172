//! A broken context: nobody knows what the device still touches, and the process lives.
//!
//! The context is the whole process's, so the test runs itself again as a child.

use std::process::Command;

use kv_core::{Backend, CopyFault, DigestWork, Direction, Layout, Outcome, Span, SubmitRefusal};
use kv_transfer_cuda::{CudaConfig, buried};

use crate::rig::{Rig, trespass};

const CHILD: &str = "KV_GPU_POISON_CHILD";
const TEST: &str = "poison::i14_a_poisoned_context_is_unknown_and_the_process_lives";

#[test]
fn i14_a_poisoned_context_is_unknown_and_the_process_lives() {
    if std::env::var_os(CHILD).is_some() {
        poison_this_process();
        return;
    }
    let myself = std::env::current_exe().expect("a path");
    let mut child = Command::new(myself);
    child.args([TEST, "--exact", "--nocapture"]).env(CHILD, "1");
    let output = child.output().expect("started");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(text.contains("1 passed"), "the child ran no test: {text}");
}

fn poison_this_process() {
    let layout = Layout::stacked(4, 64, 16, 4, 64, 2).expect("valid");
    let block_bytes = layout.block_bytes();
    let mut rig = Rig::new(layout, &CudaConfig::new(64));
    rig.finish(Direction::Out, &[(0, 0)]);
    let before = buried();
    // The step breaks the context; the copies after it are queued by then.
    trespass(&rig.stream);
    let fence = rig.fence();
    let out = rig.submit(Direction::Out, &[(1, 1), (2, 2)], fence, DigestWork::Skip);
    let back = rig.submit(Direction::In, &[(3, 0)], fence, DigestWork::Skip);
    for ticket in [out, back] {
        let ended = rig.wait(ticket);
        let fault = matches!(ended.fault, Some(CopyFault::Device { code }) if code != 0);
        assert!(fault, "{ended:?}");
        // A command that the driver refused before it knew anything of it may say so.
        assert_ne!(ended.outcome, Outcome::Done, "{ended:?}");
        assert_eq!(ended.bytes, 0);
    }
    let after = buried();
    assert!(after.commands > before.commands, "{before:?} {after:?}");
    assert!(after.payload_bytes >= before.payload_bytes + block_bytes);
    // Nothing is taken any more, and closing and dropping come back.
    for direction in [Direction::Out, Direction::In] {
        let command = rig.command(direction, &[(4, 4)], kv_core::Fence::NONE, DigestWork::Skip);
        let now = rig.now();
        let refused = rig.backend.submit(now, command).expect_err("broken");
        assert_eq!(refused.why, SubmitRefusal::Closed);
    }
    let closed = rig.backend.close(Span::from_secs(5));
    assert_eq!(closed.unconfirmed, 0, "every command was reported");
}
