//! The processes whose system calls are noted: by their commands, control groups and programs.
//!
//! The interceptor knows the command. It notes the calls of other processes too, and whoever reads
//! them leaves those out that are not meant, and declines the process for a while: then it costs
//! nothing. When that time is over, it is decided anew.

use std::collections::HashMap;

use fathom_insight::{Name, Names};
use fathom_intercept::{CommandPattern, matches};

/// The time for which a process is declined.
pub(crate) const DECLINED_NS: u64 = 1_000_000_000;
/// The longest pattern of a control group or path, in bytes.
const LENGTH_MAX: usize = 4096;
/// The decisions that are remembered.
const KNOWN_MAX: usize = 1024;

/// Which processes an entry of `calls` means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ProcessPattern {
    /// Those with such a command.
    Command(CommandPattern),
    /// Those in such a control group.
    Group(String),
    /// Those whose program has such a path.
    Program(String),
}

impl ProcessPattern {
    /// The pattern with this text.
    pub(crate) fn new(text: &str) -> Option<Self> {
        let long = |text: &str| {
            let is_right = (1..=LENGTH_MAX).contains(&text.len()) && !text.contains('\0');
            is_right.then(|| text.to_owned())
        };
        if let Some(group) = text.strip_prefix("cgroup:") {
            long(group).map(Self::Group)
        } else if let Some(path) = text.strip_prefix("path:") {
            long(path).map(Self::Program)
        } else {
            CommandPattern::new(text).map(Self::Command)
        }
    }
}

/// The processes whose calls are noted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    pub commands: Vec<CommandPattern>,
    groups: Vec<String>,
    programs: Vec<String>,
}

impl Choice {
    pub(crate) fn new(patterns: impl IntoIterator<Item = ProcessPattern>) -> Self {
        let mut choice = Self::default();
        for pattern in patterns {
            match pattern {
                ProcessPattern::Command(pattern) => choice.commands.push(pattern),
                ProcessPattern::Group(pattern) => choice.groups.push(pattern),
                ProcessPattern::Program(pattern) => choice.programs.push(pattern),
            }
        }
        choice
    }

    /// Whether no process is meant.
    pub(crate) fn is_empty(&self) -> bool {
        self.commands.is_empty() && !self.has_others()
    }

    /// Whether processes are meant that have any command.
    pub(crate) fn has_others(&self) -> bool {
        !self.groups.is_empty() || !self.programs.is_empty()
    }

    /// Whether a process is meant by its command.
    pub(crate) fn has_command(&self, command: &[u8]) -> bool {
        self.commands.iter().any(|pattern| pattern.matches(command))
    }

    /// Whether a process is meant by the path of its control group or of its program.
    fn has_place(&self, group: &str, program: &str) -> bool {
        let is_one = |patterns: &[String], text: &str| {
            patterns.iter().any(|pattern| matches(pattern.as_bytes(), text.as_bytes()))
        };
        is_one(&self.groups, group) || is_one(&self.programs, program)
    }
}

/// Decisions about control groups and programs.
#[derive(Debug, Default)]
pub(crate) struct Decisions(HashMap<(Name, Name), bool>);

impl Decisions {
    /// Whether processes in a control group, or of a program, are meant. An unknown text is that of
    /// no pattern.
    pub(crate) fn decide(
        &mut self,
        choice: &Choice,
        names: &Names,
        (group, program): (Name, Name),
    ) -> bool {
        if let Some(known) = self.0.get(&(group, program)) {
            return *known;
        }
        if self.0.len() >= KNOWN_MAX {
            self.0.clear();
        }
        let text = |name| names.text(name);
        let (group_text, program_text) = (text(group), text(program));
        let is_meant = choice.has_place(
            group_text.as_deref().unwrap_or_default(),
            program_text.as_deref().unwrap_or_default(),
        );
        self.0.insert((group, program), is_meant);
        is_meant
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(texts: &[&str]) -> Choice {
        Choice::new(texts.iter().map(|text| ProcessPattern::new(text).unwrap()))
    }

    #[test]
    fn processes_are_chosen_by_command_group_and_program() {
        let choice =
            choice(&["postgres*", "cgroup:/system.slice/*", "cgroup:/a", "path:/usr/bin/*"]);
        assert!(choice.has_command(b"postgres\0") && !choice.has_command(b"cgroup:/a\0"));
        assert!(choice.has_others() && !choice.is_empty());
        let names = Names::default();
        let mut decisions = Decisions::default();
        for (group, program, is_meant) in [
            ("/system.slice/db.service", "/opt/x", true),
            ("/system.slice", "/opt/x", false),
            ("/a", "", true),
            ("/a/b", "", false),
            ("/", "/usr/bin/dd", true),
            ("/", "/bin/dd", false),
            ("", "", false),
        ] {
            let places = (names.number(group), names.number(program));
            for _ in 0..2 {
                let decided = decisions.decide(&choice, &names, places);
                assert_eq!(decided, is_meant, "{group} {program}");
            }
        }
        // Guests have any number of groups.
        for number in 0..3 * KNOWN_MAX {
            let places = (names.number(&format!("/a/{number}")), Name::default());
            assert!(!decisions.decide(&choice, &names, places));
        }
        assert!(decisions.0.len() <= KNOWN_MAX);
    }

    #[test]
    fn patterns_without_sense_are_refused() {
        for text in ["", "cgroup:", "path:", "12345678901234567", "path:/a\0"] {
            assert_eq!(ProcessPattern::new(text), None, "{text:?}");
        }
        assert_eq!(ProcessPattern::new(&format!("path:{}", "x".repeat(LENGTH_MAX + 1))), None);
        assert!(choice(&[]).is_empty() && !choice(&["dd"]).has_others());
    }
}
