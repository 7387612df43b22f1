//! Real devices of this host: loop devices, and file systems on them. Needs root; skipped without.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fathom_devices::resolve::resolve;
use fathom_devices::{MediumKind, Placement, SysDevices, resolve_within};

/// Runs a program. Returns its output if it succeeds.
fn run(program: &str, arguments: &[&OsStr]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    output.status.success().then_some(text)
}

/// A loop device, detached when dropped.
struct Loop {
    path: PathBuf,
    name: String,
}

impl Loop {
    fn new(file: &Path) -> Option<Self> {
        let path = run("losetup", &["--find".as_ref(), "--show".as_ref(), file.as_ref()])?;
        let name = path.strip_prefix("/dev/")?.to_owned();
        Some(Self { path: path.into(), name })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run("losetup", &["--detach".as_ref(), self.path.as_ref()]);
    }
}

/// A mounted file system, unmounted when dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn new(arguments: &[&OsStr], folder: &Path) -> Option<Self> {
        std::fs::create_dir_all(folder).ok()?;
        let mut all = arguments.to_vec();
        all.push(folder.as_ref());
        run("mount", &all)?;
        Some(Self(folder.to_owned()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        run("umount", &[self.0.as_ref()]);
    }
}

fn file(path: &Path, length: u64) {
    std::fs::File::create(path).unwrap().set_len(length).unwrap();
}

fn names(placement: &Placement) -> Vec<&str> {
    placement.media.iter().map(|medium| medium.name.as_str()).collect()
}

#[test]
fn images_on_real_devices_are_resolved() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path();
    let backing: Vec<PathBuf> = (0..2).map(|index| base.join(format!("backing{index}"))).collect();
    for path in &backing {
        file(path, 512 << 20);
    }
    let beneath = resolve(&backing[0]);
    assert_eq!(beneath, resolve_within(&backing[0], Duration::from_secs(20)));
    let loops: Option<Vec<Loop>> = backing.iter().map(|path| Loop::new(path)).collect();
    let Some(loops) = loops else {
        eprintln!("skipped: this host has no loop devices, or this user may not use them");
        return;
    };
    for (name, program, flag) in
        [("ext4", "mkfs.ext4", "-F"), ("xfs", "mkfs.xfs", "-f"), ("btrfs", "mkfs.btrfs", "-f")]
    {
        let mut arguments: Vec<&OsStr> = vec![flag.as_ref(), loops[0].path.as_ref()];
        if name == "btrfs" {
            arguments.push(loops[1].path.as_ref());
        }
        if run(program, &arguments).is_none() {
            eprintln!("skipped: {program} is absent or fails");
            continue;
        }
        let mount = Mounted::new(&[loops[0].path.as_ref()], &base.join(name));
        let mount = mount.unwrap_or_else(|| panic!("{name} cannot be mounted"));
        let image = mount.0.join("image");
        file(&image, 1 << 20);
        let placement = resolve(&image);
        assert_eq!(placement.media, beneath.media, "{name}: {placement:?}");
        // Btrfs names its devices in no particular order.
        let is_among = placement.through.contains(&loops[0].name);
        let is_first = name == "btrfs" || placement.through[0] == loops[0].name;
        assert!(is_among && is_first, "{name}: {placement:?}");
        assert_eq!(placement.through.contains(&loops[1].name), name == "btrfs", "{placement:?}");
        // The same image behind a bind mount and an overlay.
        let bound = Mounted::new(&["--bind".as_ref(), mount.0.as_ref()], &base.join("bound"));
        assert_eq!(resolve(&bound.unwrap().0.join("image")), placement, "{name}");
        for folder in ["upper", "work"] {
            std::fs::create_dir(mount.0.join(folder)).unwrap();
        }
        let root = mount.0.display();
        let options = format!("lowerdir={root},upperdir={root}/upper,workdir={root}/work");
        let arguments = ["-t".as_ref(), "overlay".as_ref(), "overlay".as_ref(), "-o".as_ref()];
        let arguments = [&arguments[..], &[options.as_ref()]].concat();
        if let Some(overlay) = Mounted::new(&arguments, &base.join("overlay")) {
            assert_eq!(resolve(&overlay.0.join("image")).media, beneath.media, "{name}");
        }
    }
    // The device itself.
    let placement = resolve(&loops[1].path);
    assert_eq!((&placement.media, &*placement.through[0]), (&beneath.media, &*loops[1].name));
    let activity = SysDevices::default().activity(&loops[0].name).unwrap();
    assert!(activity.writes > 0 && activity.written_bytes > 0, "{activity:?}");
    assert_eq!(SysDevices::default().facts(&loops[0].name).size_bytes, 512 << 20);
}

#[test]
fn memory_and_absent_images_are_no_devices() {
    let placement = resolve(Path::new("/dev/shm"));
    assert_eq!(names(&placement), ["memory"], "{placement:?}");
    let absent = resolve(Path::new("/dev/shm/absent/image"));
    assert_eq!(absent.media.first().map(|medium| medium.kind), Some(MediumKind::Unknown));
    assert!(absent.problem.is_some());
}
