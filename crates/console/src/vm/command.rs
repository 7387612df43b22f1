//! The QEMU command line of a machine.
use std::path::PathBuf;

use super::{accelerator::Accelerator, qemu::Qemu};

/// A disk that QEMU reaches by vhost-user.
#[derive(Clone, Debug)]
pub struct QemuDisk {
    /// The daemon's socket.
    pub socket: PathBuf,
    /// The number of queues.
    pub queues: u16,
}

/// The parts of a command line.
#[derive(Clone, Debug)]
pub struct Machine {
    pub qemu: Qemu,
    pub accelerator: Accelerator,
    /// A plugin of QEMU, with its arguments.
    pub plugin: Option<String>,
    pub name: String,
    pub kind: String,
    pub cpu: Option<String>,
    pub cpus: u16,
    pub memory_mib: u64,
    pub disks: Vec<QemuDisk>,
    pub kernel: Option<PathBuf>,
    pub initrd: Option<PathBuf>,
    pub append: Option<String>,
    pub serial: String,
    pub display: String,
    pub network: String,
    pub qmp: Option<PathBuf>,
    pub daemonize: bool,
    pub extra: Vec<String>,
}

impl Machine {
    /// QEMU's options, each with its value.
    pub fn options(&self) -> Vec<Vec<String>> {
        let mut options = Vec::new();
        let mut add = |words: &[&str]| options.push(words.iter().map(|&w| w.to_owned()).collect());
        let (accelerator, cpu) = self.accelerator.options();
        let memory = format!("{}M", self.memory_mib);
        add(&["-name", &self.name]);
        add(&["-nodefaults"]);
        add(&["-machine", &format!("{},memory-backend=memory", self.kind)]);
        add(&["-accel", accelerator]);
        add(&["-cpu", self.cpu.as_deref().unwrap_or(cpu)]);
        add(&["-smp", &self.cpus.to_string()]);
        add(&["-m", &memory]);
        // The daemon reads and writes the guest's memory, so the memory has to be shared.
        let memory = format!("memory-backend-memfd,id=memory,size={memory},share=on");
        add(&["-object", &memory]);
        for (index, disk) in self.disks.iter().enumerate() {
            let path = comma(&disk.socket.display().to_string());
            let reconnect = self.qemu.reconnect();
            let chardev = format!("socket,id=disk{index},path={path},{reconnect}");
            let boot =
                if self.kernel.is_none() { format!(",bootindex={index}") } else { String::new() };
            let queues = disk.queues;
            let device =
                format!("vhost-user-blk-pci,chardev=disk{index},num-queues={queues}{boot}");
            add(&["-chardev", &chardev]);
            add(&["-device", &device]);
        }
        if let Some(kernel) = &self.kernel {
            add(&["-kernel", &kernel.display().to_string()]);
            if let Some(initrd) = &self.initrd {
                add(&["-initrd", &initrd.display().to_string()]);
            }
            let console = if self.qemu.is_x86() { "ttyS0" } else { "ttyAMA0" };
            add(&["-append", &self.append.clone().unwrap_or(format!("console={console}"))]);
        }
        if self.network != "none" {
            add(&["-nic", &self.network]);
        }
        add(&["-display", &self.display]);
        if self.display != "none" {
            add(&["-vga", "std"]);
        }
        add(&["-serial", &self.serial]);
        if let Some(qmp) = &self.qmp {
            add(&["-qmp", &format!("unix:{},server=on,wait=off", qmp.display())]);
        }
        if let Some(plugin) = &self.plugin {
            add(&["-plugin", plugin]);
        }
        if self.daemonize {
            add(&["-daemonize"]);
        }
        if !self.extra.is_empty() {
            options.push(self.extra.clone());
        }
        options
    }

    /// The command line for a shell, one option per line.
    pub fn shell(&self) -> String {
        let mut text = quote(&self.qemu.path.display().to_string());
        for option in self.options() {
            let words: Vec<String> = option.iter().map(|word| quote(word)).collect();
            text += &format!(" \\\n    {}", words.join(" "));
        }
        text
    }

    /// The command line as words.
    pub fn words(&self) -> Vec<String> {
        let mut words = vec![self.qemu.path.display().to_string()];
        words.extend(self.options().into_iter().flatten());
        words
    }
}

/// Escapes commas for QEMU's options by doubling them.
fn comma(text: &str) -> String {
    text.replace(',', ",,")
}

/// Quotes a word for a POSIX shell.
pub fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./,=:+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::{super::qemu::QemuVersion, *};

    fn machine(version: QemuVersion) -> Machine {
        Machine {
            qemu: Qemu { path: "qemu-system-x86_64".into(), version, version_text: String::new() },
            accelerator: Accelerator::Tcg,
            plugin: None,
            name: "guest".into(),
            kind: "q35".into(),
            cpu: None,
            cpus: 2,
            memory_mib: 512,
            disks: vec![QemuDisk { socket: "/run/a,b.sock".into(), queues: 2 }],
            kernel: None,
            initrd: None,
            append: None,
            serial: "mon:stdio".into(),
            display: "none".into(),
            network: "user,model=virtio-net-pci".into(),
            qmp: None,
            daemonize: false,
            extra: vec![],
        }
    }

    #[test]
    fn memory_is_shared_and_disks_reconnect() {
        let text = machine(QemuVersion(10, 0)).shell();
        assert!(text.contains("-object memory-backend-memfd,id=memory,size=512M,share=on"));
        assert!(text.contains("-machine q35,memory-backend=memory"));
        assert!(text.contains("path=/run/a,,b.sock,reconnect-ms=1000"), "{text}");
        assert!(text.contains("chardev=disk0,num-queues=2,bootindex=0"));
        assert!(machine(QemuVersion(7, 2)).shell().contains(",reconnect=1"));
        assert!(text.lines().count() > 10 && text.lines().next().unwrap_or("").ends_with('\\'));
    }

    #[test]
    fn words_are_quoted_for_the_shell() {
        assert_eq!(quote("a b"), "'a b'");
        assert_eq!(quote("it's"), r"'it'\''s'");
        assert_eq!(quote(""), "''");
        assert_eq!(quote("a=b,c"), "a=b,c");
        let with_kernel = Machine {
            kernel: Some("/boot/vmlinuz".into()),
            append: Some("console=ttyS0 root=/dev/vda".into()),
            ..machine(QemuVersion(9, 2))
        };
        let text = with_kernel.shell();
        assert!(text.contains("-append 'console=ttyS0 root=/dev/vda'"), "{text}");
        assert!(!text.contains("bootindex"));
    }
}
