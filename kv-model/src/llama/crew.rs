//! Threads that go through the phases of a step together.
//!
//! A step is a list of phases, each a number of tasks. Every thread does the same: take tasks of
//! the current phase until there are none, wait until the others finished theirs, go on to the
//! next phase. Nobody is waited for but those who hold a task: on a busy machine, a thread that
//! doesn't get to run costs nothing, since the others take its tasks.
//!
//! Threads live for one step, inside a scope: starting one costs about 30 µs against a step of
//! 10 ms and more, and in exchange they borrow what the step borrows, without unsafe code, and an
//! idle model has no threads at all.
//! Between phases a thread looks [`SPINS_MAX`] times, at most about 50 µs, and then sleeps until
//! it is woken.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;

use parking_lot::{Condvar, Mutex};

/// How often a thread looks before it sleeps. One look takes 40 to 140 cycles.
const SPINS_MAX: u32 = 1000;

/// A task panicked; the step's results are not usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Panicked;

/// Runs all phases; `phases[p]` is the number of tasks of phase `p`, and `scratch` holds one
/// element per thread, at least one. The caller is one of the threads.
///
/// All tasks of a phase are over before a task of the next one starts.
pub(super) fn run<S: Send>(
    scratch: &mut [S],
    phases: &[usize],
    task: &(impl Fn(&mut S, usize, usize) + Sync),
) -> Result<(), Panicked> {
    let progress = Progress::new(phases);
    let (own, others) = scratch
        .split_first_mut()
        .expect("there is at least one thread");
    thread::scope(|scope| {
        let mut helpers = Vec::with_capacity(others.len());
        for scratch in others {
            let progress = &progress;
            let helper = thread::Builder::new().name("llama".to_owned());
            // Without helpers the caller does all tasks.
            if let Ok(helper) = helper.spawn_scoped(scope, move || progress.work(scratch, task)) {
                helpers.push(helper);
            }
        }
        progress.work(own, task);
        for helper in helpers {
            if helper.join().is_err() {
                progress.failed.store(true, SeqCst);
            }
        }
    });
    if progress.failed.load(SeqCst) {
        Err(Panicked)
    } else {
        Ok(())
    }
}

#[derive(Debug)]
struct Phase {
    tasks: usize,
    /// The next task to be taken.
    next: AtomicUsize,
    over: AtomicUsize,
}

#[derive(Debug)]
struct Progress {
    phases: Vec<Phase>,
    failed: AtomicBool,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Progress {
    fn new(phases: &[usize]) -> Self {
        let phase = |&tasks| Phase {
            tasks,
            next: AtomicUsize::new(0),
            over: AtomicUsize::new(0),
        };
        Self {
            phases: phases.iter().map(phase).collect(),
            failed: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        }
    }

    fn work<S>(&self, scratch: &mut S, task: &impl Fn(&mut S, usize, usize)) {
        for (index, phase) in self.phases.iter().enumerate() {
            loop {
                let number = phase.next.fetch_add(1, SeqCst);
                if number >= phase.tasks {
                    break;
                }
                let finish = Finish {
                    progress: self,
                    phase,
                };
                task(scratch, index, number);
                drop(finish);
            }
            self.wait(phase);
            if self.failed.load(SeqCst) {
                return;
            }
        }
    }

    fn may_go_on(&self, phase: &Phase) -> bool {
        phase.over.load(SeqCst) == phase.tasks || self.failed.load(SeqCst)
    }

    fn wait(&self, phase: &Phase) {
        for _ in 0..SPINS_MAX {
            if self.may_go_on(phase) {
                return;
            }
            std::hint::spin_loop();
        }
        let mut lock = self.lock.lock();
        // Counted before the last look: whoever ends the phase after it sees a sleeper.
        self.sleepers.fetch_add(1, SeqCst);
        while !self.may_go_on(phase) {
            self.wake.wait(&mut lock);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }
}

/// Counts a task as over, also when it panics.
struct Finish<'a> {
    progress: &'a Progress,
    phase: &'a Phase,
}

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        let progress = self.progress;
        if thread::panicking() {
            progress.failed.store(true, SeqCst);
        }
        self.phase.over.fetch_add(1, SeqCst);
        if progress.may_go_on(self.phase) && progress.sleepers.load(SeqCst) > 0 {
            // With the lock, a thread is either before its last look or already asleep.
            let lock = progress.lock.lock();
            progress.wake.notify_all();
            drop(lock);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_and_phases_do_not_mix() {
        for threads in [1, 2, 3, 7] {
            let phases = [3, 0, 1, 50, 2];
            let done: Vec<Vec<AtomicUsize>> = phases
                .iter()
                .map(|&n| (0..n).map(|_| AtomicUsize::new(0)).collect())
                .collect();
            let mut scratch = vec![0usize; threads];
            for round in 1..=20 {
                run(&mut scratch, &phases, &|count: &mut usize, phase, task| {
                    for earlier in &done[..phase] {
                        assert!(earlier.iter().all(|n| n.load(SeqCst) == round));
                    }
                    done[phase][task].fetch_add(1, SeqCst);
                    *count += 1;
                })
                .unwrap();
            }
            assert_eq!(scratch.iter().sum::<usize>(), 20 * 56);
        }
    }

    #[test]
    fn a_panic_in_a_helper_ends_the_step_with_an_error() {
        let caller = thread::current().id();
        let met = AtomicBool::new(false);
        for _ in 0..200 {
            let result = run(&mut [(), ()], &[64, 64], &|_, phase, _| {
                if phase == 0 && thread::current().id() != caller {
                    met.store(true, SeqCst);
                    // Not the macro: the message would look like a failed test.
                    std::panic::resume_unwind(Box::new("planted"));
                }
                thread::yield_now();
            });
            if met.load(SeqCst) {
                assert_eq!(result, Err(Panicked));
                return;
            }
        }
        panic!("the helper never got a task");
    }
}
