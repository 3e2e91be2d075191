//! What this node and this process may use, and who they are.
//!
//! Owns: reading `/proc` and the cgroup tree; a missing or odd file means "no answer", never a guess.
//! Must not: decide a budget (the engine does).

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes that the node can give without swapping.
pub fn memory_available() -> Option<u64> {
    meminfo_available(&fs::read_to_string("/proc/meminfo").ok()?)
}

/// Bytes that the control groups of this process still allow; `None` where none has a limit. Page cache that the kernel
/// can drop at once counts as free.
pub fn cgroup_headroom() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    headroom_below(Path::new("/sys/fs/cgroup"), &groups)
}

/// Bytes that can still be written below `dir`.
pub fn free_bytes(dir: &Path) -> Option<u64> {
    crate::file::free_bytes(dir).ok()
}

/// The name of this machine.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// A text that changes with every boot.
pub fn boot_id() -> Option<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned())
}

/// When the process started, in clock ticks since boot; with the pid it names a process for as long as the machine is
/// up. `None` if there is no such process, or it is dead and only waits for its parent (a zombie holds nothing).
pub fn process_start_time(pid: u32) -> Option<u64> {
    start_time_of(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

fn start_time_of(stat: &str) -> Option<u64> {
    // The command's name may hold spaces and brackets: fields are counted after the last bracket.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// The least room that any group on the way from this process's group to the root leaves.
fn headroom_below(mount: &Path, groups: &str) -> Option<u64> {
    let mut least: Option<u64> = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (base, files) = if controllers.is_empty() {
            (mount.to_owned(), &V2)
        } else if controllers.split(',').any(|name| name == "memory") {
            (mount.join("memory"), &V1)
        } else {
            continue;
        };
        let mut group: PathBuf = base.join(path.trim_start_matches('/'));
        // In a container the path may be the host's and not exist here: the walk up ends at the mount, which is ours.
        while group.starts_with(&base) {
            least = [least, files.headroom(&group)].into_iter().flatten().min();
            if !group.pop() {
                break;
            }
        }
    }
    least
}

struct GroupFiles {
    limit: &'static str,
    usage: &'static str,
    cache: &'static str,
}

const V2: GroupFiles = GroupFiles { limit: "memory.max", usage: "memory.current", cache: "inactive_file" };
const V1: GroupFiles =
    GroupFiles { limit: "memory.limit_in_bytes", usage: "memory.usage_in_bytes", cache: "total_inactive_file" };

impl GroupFiles {
    fn headroom(&self, group: &Path) -> Option<u64> {
        let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        // "max" in v2 is no number; v1 says "none" with a number near 2^63.
        let limit = number(self.limit).filter(|limit| *limit < 1 << 60)?;
        let used = number(self.usage)?;
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let cache =
            stat.lines().find_map(|line| line.strip_prefix(self.cache)?.trim().parse::<u64>().ok()).unwrap_or(0);
        Some(limit.saturating_sub(used.saturating_sub(cache)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_and_process_are_known() {
        assert!(memory_available().unwrap() > 0);
        assert!(!host_name().is_empty());
        assert_eq!(boot_id().unwrap().len(), 36);
        let own = process_start_time(std::process::id()).unwrap();
        assert_eq!(process_start_time(std::process::id()), Some(own));
        assert_eq!(process_start_time(u32::MAX), None);
    }

    #[test]
    fn odd_command_names_do_not_shift_the_fields_and_zombies_are_dead() {
        let rest = "1 1 1 0 -1 4194304 100 0 0 0 5 5 0 0 20 0 1 0 777 1000 10";
        assert_eq!(start_time_of(&format!("42 (a) b (c) S {rest}")), Some(777));
        assert_eq!(start_time_of(&format!("42 (python) Z {rest}")), None);
        assert_eq!(start_time_of("garbage"), None);
    }

    #[test]
    fn the_tightest_group_on_the_way_up_counts_and_droppable_cache_is_room() {
        let mount = tempfile::tempdir().unwrap();
        let group = mount.path().join("job/step");
        fs::create_dir_all(&group).unwrap();
        let write = |path: &Path, name: &str, text: &str| fs::write(path.join(name), text).unwrap();
        write(&group, "memory.max", "max\n");
        assert_eq!(headroom_below(mount.path(), "0::/job/step\n"), None);
        write(&mount.path().join("job"), "memory.max", "1000\n");
        write(&mount.path().join("job"), "memory.current", "700\n");
        write(&mount.path().join("job"), "memory.stat", "anon 5\ninactive_file 200\n");
        assert_eq!(headroom_below(mount.path(), "0::/job/step\n"), Some(500));
        write(&group, "memory.max", "100\n");
        write(&group, "memory.current", "150\n");
        assert_eq!(headroom_below(mount.path(), "0::/job/step\n"), Some(0));
    }

    #[test]
    fn the_first_version_of_control_groups_is_read_too() {
        let mount = tempfile::tempdir().unwrap();
        let group = mount.path().join("memory/job");
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("memory.limit_in_bytes"), "9223372036854771712").unwrap();
        fs::write(group.join("memory.usage_in_bytes"), "5").unwrap();
        assert_eq!(headroom_below(mount.path(), "4:memory:/job\n1:cpu:/x\n"), None);
        fs::write(group.join("memory.limit_in_bytes"), "4096").unwrap();
        assert_eq!(headroom_below(mount.path(), "4:memory:/job\n"), Some(4091));
    }

    #[test]
    fn available_memory_is_read_in_bytes() {
        assert_eq!(meminfo_available("MemTotal: 9 kB\nMemAvailable:   12 kB\n"), Some(12_288));
        assert_eq!(meminfo_available("MemTotal: 9 kB\n"), None);
    }
}
