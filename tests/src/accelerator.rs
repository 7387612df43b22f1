//! Finds by trial the accelerator that guests use on this host.

use std::path::Path;
use std::sync::OnceLock;

use crate::process::Process;
use crate::{Assets, Qemu, Result, patience};

/// The argument of QEMU's `-accel`: KVM if a guest runs under it, otherwise emulation.
///
/// The device file does not prove that KVM works: `/dev/kvm` may open although no guest can run an
/// instruction. So a kernel is started once and must print a line. The result is kept beside the
/// guest's images until the host reboots.
///
/// # Errors
/// When there is no guest for the trial.
pub fn accelerator() -> Result<&'static str> {
    static ANSWER: OnceLock<String> = OnceLock::new();
    if let Some(answer) = ANSWER.get() {
        return Ok(answer);
    }
    let answer = match std::env::var("FATHOM_ACCEL") {
        Ok(forced) => forced,
        Err(_) => remembered()?,
    };
    Ok(ANSWER.get_or_init(|| answer))
}

fn remembered() -> Result<String> {
    let assets = Assets::get()?;
    let note = assets.directory.join("accelerator");
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    if let Some((noted_boot, answer)) =
        std::fs::read_to_string(&note).ok().as_deref().and_then(|text| text.split_once(' '))
    {
        if noted_boot == boot.trim() {
            return Ok(answer.to_owned());
        }
    }
    let answer = if kvm_runs(assets)? { "kvm" } else { "tcg,thread=multi" };
    std::fs::write(&note, format!("{} {answer}", boot.trim()))?;
    Ok(answer.to_owned())
}

fn kvm_runs(assets: &Assets) -> Result<bool> {
    if !Path::new("/dev/kvm").exists() {
        return Ok(false);
    }
    let directory = tempfile::tempdir()?;
    let console = directory.path().join("console");
    let serial = format!("file:{}", console.display());
    let kernel = assets.kernel.display().to_string();
    let arguments = [
        &["-accel", "kvm", "-cpu", "host", "-m", "256", "-machine", "q35"][..],
        &["-nodefaults", "-display", "none", "-no-reboot", "-serial", &serial],
        &["-kernel", &kernel, "-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1"],
    ]
    .concat()
    .into_iter()
    .map(str::to_owned)
    .collect::<Vec<_>>();
    let qemu = Qemu::current()?;
    let process = Process::start(qemu.binary(), &arguments, &directory.path().join("log"))?;
    let printed = crate::until("the kernel's first line", patience(5), || {
        process.expect_running()?;
        let text = std::fs::read(&console).unwrap_or_default();
        Ok(String::from_utf8_lossy(&text).contains("Linux version").then_some(()))
    });
    process.kill();
    Ok(printed.is_ok())
}
