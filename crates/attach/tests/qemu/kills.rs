//! Attaching, and deaths at each step.

use crate::machine::{self, Machine, PagerProcess, until};

const MIB: u64 = 1 << 20;

pub fn it_attaches_and_detaches_a_hundred_times() {
    let mut machine = Machine::start();
    let mut pauses = Vec::new();
    for round in 0..100 {
        // A userfaultfd that is kept, and now and then a new one.
        if round % 4 == 0 {
            machine.forget();
        }
        let mut pager = PagerProcess::start(&machine, &[], "attach", "");
        let status = pager.attached();
        assert_eq!(status.is_adopted, round % 4 != 0, "{round}");
        assert_eq!((status.memory_bytes, machine.registered()), (64 * MIB, 64 * MIB));
        assert!(status.is_tripwire_tried);
        if !status.is_adopted {
            pauses.push(status.pause_ns);
        }
        if round % 10 == 0 {
            machine.check();
        }
        let status = pager.detach();
        assert_eq!((status.state.as_str(), machine.registered()), ("detached", 0));
        assert_eq!(machine.userfaults(), round / 4 + 1);
    }
    machine.check();
    pauses.sort_unstable();
    println!(
        "pause of the main thread for {} injections: p50 {} us, longest {} us",
        pauses.len(),
        pauses[pauses.len() / 2] / 1000,
        pauses[pauses.len() - 1] / 1000
    );
}

pub fn a_vmm_of_another_user_in_a_sandbox() {
    let sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    let mut machine = Machine::with(
        &["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--no-new-privs"],
        "memory-backend-memfd,id=m,size=64M,share=on",
        &["-sandbox", sandbox],
    );
    let mut pager = PagerProcess::start(&machine, &[], "attach", "");
    println!("pause of the main thread: {} us", pager.attached().pause_ns / 1000);
    machine.check();
    assert_eq!(machine.registered(), 64 * MIB);
    pager.detach();
    // Without the machine protocol it would have to make the userfaultfd itself.
    machine.forget();
    let path = std::path::Path::new("-");
    let refused = PagerProcess::start_with(&machine, &[], path, "attach", "").refused();
    assert!(refused.contains("--qmp"), "{refused}");
    machine.check();
}

pub fn an_injector_killed_at_each_step() {
    let mut machine = Machine::start();
    for round in 0..3 {
        for step in 0..7 {
            machine.forget();
            let die_at = format!("injector:{step}");
            let mut pager = PagerProcess::start(&machine, &[], "attach", &die_at);
            // Its call is made in any case once the registers are set, and then all goes on.
            if step < 3 {
                let refused = pager.refused();
                assert!(refused.contains("the VMM goes on"), "{step}: {refused}");
                machine.check();
                assert_eq!(machine.registered(), 0);
                continue;
            }
            let status = pager.attached();
            assert!(!status.is_adopted, "round {round}, step {step}");
            machine.check();
            assert_eq!(machine.registered(), 64 * MIB);
            pager.detach();
        }
    }
    machine.check();
}

pub fn an_injector_that_is_stopped() {
    let mut machine = Machine::start();
    for step in [1, 2, 3, 4, 5] {
        machine.forget();
        let die_at = format!("stop-injector:{step}");
        let mut pager = PagerProcess::start(&machine, &[], "attach", &die_at);
        let line = pager.outcome();
        machine.check();
        if line.starts_with("attached") {
            pager.detach();
        }
        let mut pager = PagerProcess::start(&machine, &[], "attach", "");
        pager.attached();
        machine.check();
        pager.detach();
    }
}

pub fn a_pager_killed_at_each_step() {
    let mut machine = Machine::start();
    for round in 0..3 {
        for step in 0..8 {
            machine.forget();
            PagerProcess::start(&machine, &[], "attach", &format!("pager:{step}")).died();
            machine.check();
            until("release of the memory by the guard", || {
                (machine.registered() == 0).then_some(())
            });
            // From the injection on, nothing has to be injected again.
            let mode = if step >= 2 { "adopt" } else { "attach" };
            let mut pager = PagerProcess::start(&machine, &[], mode, "");
            let status = pager.attached();
            assert_eq!(status.is_adopted, step >= 2, "round {round}, step {step}");
            assert_eq!((status.pause_ns == 0, machine.registered()), (step >= 2, 64 * MIB));
            machine.check();
            if round == 1 {
                pager.kill();
                until("release by the guard", || (machine.registered() == 0).then_some(()));
            } else {
                pager.detach();
            }
            machine.check();
        }
    }
}

pub fn a_guard_that_is_killed_is_replaced() {
    let mut machine = Machine::start();
    let mut pager = PagerProcess::start(&machine, &[], "attach", "");
    let guard = pager.attached().guard as i32;
    // SAFETY: a signal to a process that this test has started.
    unsafe { libc::kill(guard, libc::SIGKILL) };
    let parent = pager.child.id();
    let other = until("other guard", || {
        let children = format!("/proc/{parent}/task/{parent}/children");
        let children = std::fs::read_to_string(children).unwrap();
        let other = children.split_whitespace().filter_map(|word| word.parse::<i32>().ok());
        other.into_iter().find(|child| *child != guard)
    });
    assert_ne!(other, guard);
    until("readiness of the other guard", || machine::is_guard(other).then_some(()));
    machine.check();
    // The new one does its duty.
    pager.kill();
    until("release by the second guard", || (machine.registered() == 0).then_some(()));
    machine.check();
}

pub fn two_pagers_are_one_too_many() {
    let mut machine = Machine::start();
    let mut pager = PagerProcess::start(&machine, &[], "attach", "");
    pager.attached();
    let refused = PagerProcess::start(&machine, &[], "attach", "").refused();
    assert!(refused.contains("has a pager already") && refused.contains("detach"), "{refused}");
    let status = pager.detach();
    assert_eq!(status.counts.guards_lost, 0);
    let refused = PagerProcess::start(&Machine::start(), &[], "adopt", "").refused();
    assert!(refused.contains("no pager has left anything"), "{refused}");
    machine.check();
}
