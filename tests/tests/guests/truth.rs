//! Tests of the truth that introspection is compared with: each file is at the position that the
//! truth has, in all file systems, through device mapper and md.

use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use fathom_tests::{Assets, Disk, Guest, ObjectKind, Result, Truth};

/// Checks that the beginning of every fifth file is on the disk at the position that the truth has.
/// Returns the number of checked files with a position.
fn check_places(guest: &Guest, truth: &Truth, mount: &str, image: &Path) -> Result<usize> {
    // One program reads all files: in an emulated guest, starting a program takes longer than
    // reading a file.
    let beginnings = guest.check(&format!(
        r#"cd {mount}; find . -type f | awk 'NR % 5 == 1 {{
            path = substr($0, 2); gsub(/\047/, "&&", path)
            printf "select hex(substr(readfile(\047.%s\047), 1, 512)) || \047 %s\047;\n", path, path
        }}' | sqlite3 :memory:"#
    ))?;
    let image = File::open(image)?;
    let mut count = 0;
    let mut expected = String::new();
    for line in beginnings.lines() {
        let (beginning, path) = line.split_once(' ').expect("a beginning and a path");
        let object = truth.at_path(path).unwrap_or_else(|| panic!("no {path} in the truth"));
        assert_eq!(object.kind, ObjectKind::File, "{path}");
        let Some(extent) = object.extents.first() else { continue };
        let mut bytes = vec![0; object.size.min(512) as usize];
        image.read_exact_at(&mut bytes, extent.start)?;
        writeln!(expected, "{path}").expect("writing to a text cannot fail");
        let on_disk = bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02X}"));
        count += usize::from(on_disk == beginning);
    }
    assert_eq!(
        count,
        expected.lines().count(),
        "some of these files are not where the truth has them:\n{expected}"
    );
    Ok(count)
}

#[test]
fn files_are_where_the_truth_has_them() -> Result<()> {
    let assets = Assets::get()?;
    let Some(kernel) = assets.kernel("plain")? else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let image = |name: &str| directory.path().join(name);
    // The name, and the commands that make the device on the disk and the file system on the
    // device.
    let cases = [
        ("ext4", "device=$disk; mkfs.ext4 -q $device"),
        ("xfs", "device=$disk; mkfs.xfs -q $device"),
        ("btrfs", "device=$disk; mkfs.btrfs -q $device"),
        ("f2fs", "device=$disk; mkfs.f2fs -q $device"),
        (
            "lvm",
            "pvcreate -q $disk; vgcreate -q group $disk
            lvcreate -q -Zn -Wn -l 100%FREE -n volume group; device=/dev/mapper/group-volume
            mkfs.f2fs -q $device",
        ),
        (
            "raid",
            "losetup /dev/loop0 $disk; mdadm -q --create /dev/md0 --run --level=1 --raid-devices=2 --assume-clean $disk missing
            device=/dev/md0; mkfs.xfs -q $device",
        ),
    ];
    let mut builder = Guest::builder().root(Disk::snapshot_of(&assets.root)).kernel(kernel);
    for (name, _) in cases {
        File::create(image(name))?.set_len(400 << 20)?;
        builder = builder.disk(Disk::file(image(name)));
    }
    let guest = builder.start()?;
    for (number, (name, make)) in cases.into_iter().enumerate() {
        let disk = format!("/dev/vd{}", char::from(b'b' + number as u8));
        guest.check(&format!(
            "export DM_DISABLE_UDEV=1; modprobe -a dm-mod raid1 2>/dev/null || true
            disk={disk}; {{ {make}; }} > /run/made 2>&1 || {{ cat /run/made; exit 1; }}
            mkdir -p /mnt/{name}; mount $device /mnt/{name}
            /usr/lib/fathom/phases /mnt/{name} small copy direct untar"
        ))?;
        let mount = format!("/mnt/{name}");
        let truth = Truth::of(&guest, &mount)?;
        let count = check_places(&guest, &truth, &mount, &image(name))?;
        println!("{name}: {count} files, {:?}", truth.summary());
        assert!(count > 50, "{name}: only {count} files have a position");
    }
    guest.check_console()?;
    guest.shutdown()
}
