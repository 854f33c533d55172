//! What the system lets a process page-lock: the memory limits of its control groups, and
//! `RLIMIT_MEMLOCK`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::CudaError;
use crate::error::MemoryLimit;

/// Where control groups are mounted.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// Refuses a pool that a control group would kill the process for.
///
/// What the group's processes use by now counts, reclaimable file pages apart.
pub(crate) fn check_control_groups(asked: u64, flag: &'static str) -> Result<(), CudaError> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    for (file, allowed) in rooms(Path::new(CGROUP_ROOT), &own) {
        if asked > allowed {
            let limit = MemoryLimit::ControlGroup(file);
            return Err(CudaError::MemoryLimit {
                asked,
                allowed,
                limit,
                flag,
            });
        }
    }
    Ok(())
}

/// Raises the soft limit on locked memory as far as the hard one goes, and says what it is then;
/// `None` means unlimited.
///
/// NVIDIA's driver does not count page-locked memory against this limit on common systems, so a
/// low value alone is no reason to refuse; it is named when page-locking fails.
pub(crate) fn raise_locked_memory() -> Option<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limits = getrlimit(Resource::Memlock);
    if limits.current == limits.maximum {
        return limits.current;
    }
    let raised = Rlimit {
        current: limits.maximum,
        maximum: limits.maximum,
    };
    match setrlimit(Resource::Memlock, raised) {
        Ok(()) => limits.maximum,
        Err(_) => limits.current,
    }
}

/// The error for a failed attempt to page-lock, if the limit on locked memory may be why.
pub(crate) fn locked_memory_error(
    asked: u64,
    allowed: Option<u64>,
    flag: &'static str,
) -> Option<CudaError> {
    let allowed = allowed.filter(|&allowed| allowed < asked)?;
    let limit = MemoryLimit::LockedMemory;
    Some(CudaError::MemoryLimit {
        asked,
        allowed,
        limit,
        flag,
    })
}

/// For each control group that limits this process: the file that says so, and the room left.
fn rooms(root: &Path, own: &str) -> Vec<(PathBuf, u64)> {
    let mut found = Vec::new();
    for line in own.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(group)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let group = group.trim_start_matches('/');
        if controllers.is_empty() {
            let files = ("memory.max", "memory.current", "inactive_file");
            climb(root, group, files, &mut found);
        } else if controllers.split(',').any(|name| name == "memory") {
            let files = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            );
            climb(&root.join("memory"), group, files, &mut found);
        }
    }
    found
}

/// Looks at a group and at all groups around it. Inside a container the group's own path may not
/// be visible; the mounted root is then the group.
fn climb(
    root: &Path,
    group: &str,
    (limit, usage, reclaimable): (&str, &str, &str),
    found: &mut Vec<(PathBuf, u64)>,
) {
    let mut at = root.join(group);
    while at.starts_with(root) {
        let file = at.join(limit);
        if let Some(limit) = number(&file) {
            let used = number(&at.join(usage)).unwrap_or(0);
            let statistics = fs::read_to_string(at.join("memory.stat")).unwrap_or_default();
            let spare = field(&statistics, reclaimable).unwrap_or(0);
            found.push((file, limit.saturating_sub(used.saturating_sub(spare))));
        }
        if !at.pop() {
            break;
        }
    }
}

/// A file that holds one number; `None` if it isn't there or says `max`.
fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// A field of a file of names and numbers.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut words = text.lines().map(|line| line.split_ascii_whitespace());
    words.find_map(|mut line| {
        if line.next() == Some(name) {
            line.next()?.parse().ok()
        } else {
            None
        }
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{field, locked_memory_error, rooms};
    use crate::CudaError;
    use crate::error::MemoryLimit;

    struct Tree(std::path::PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let id = std::process::id();
            let root = std::env::temp_dir().join(format!("kv-transfer-cuda-{id}-{name}"));
            for (file, text) in files {
                let path = root.join(file);
                fs::create_dir_all(path.parent().expect("in the tree")).expect("writable");
                fs::write(path, text).expect("writable");
            }
            Self(root)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    #[test]
    fn the_tightest_group_of_version_2_counts_without_its_file_pages() {
        let tree = Tree::new(
            "v2",
            &[
                ("pod/memory.max", "10000\n"),
                ("pod/memory.current", "4000\n"),
                ("pod/memory.stat", "anon 1\ninactive_file 1500\n"),
                ("pod/app/memory.max", "max\n"),
                ("pod/app/memory.current", "100\n"),
            ],
        );
        let found = rooms(&tree.0, "0::/pod/app\n");
        assert_eq!(found, [(tree.0.join("pod/memory.max"), 7_500)]);
    }

    #[test]
    fn version_1_is_read_too_and_so_is_the_root_of_a_container() {
        let files = [
            ("memory/memory.limit_in_bytes", "5000\n"),
            ("memory/memory.usage_in_bytes", "6000\n"),
        ];
        let tree = Tree::new("v1", &files);
        let found = rooms(&tree.0, "5:cpu,cpuacct:/x\n4:memory:/docker/hidden\n");
        assert_eq!(found, [(tree.0.join("memory/memory.limit_in_bytes"), 0)]);
    }

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        assert_eq!(
            field("total_inactive_file 3\ninactive_file 4\n", "inactive_file"),
            Some(4)
        );
        assert_eq!(field("inactive_file\n", "inactive_file"), None);
    }

    #[test]
    fn a_limit_on_locked_memory_is_named_with_both_numbers() {
        let error = locked_memory_error(100, Some(64), "--pool").expect("64 are fewer than 100");
        let limit = MemoryLimit::LockedMemory;
        assert_eq!(
            error,
            CudaError::MemoryLimit {
                asked: 100,
                allowed: 64,
                limit,
                flag: "--pool"
            }
        );
        let text = error.to_string();
        for part in ["100", "64", "RLIMIT_MEMLOCK", "--pool"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert_eq!(locked_memory_error(100, None, "--pool"), None);
        assert_eq!(locked_memory_error(100, Some(100), "--pool"), None);
    }
}
