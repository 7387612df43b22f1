//! The commands for the disks of the running daemon: add, retry, remove, list.
use std::io::{self, BufRead, IsTerminal};

use fathom_control::{
    Bytes, ClientError, DiskChange, DiskDefinition, DiskList, DiskStatus, ErrorCode,
    FrontendStatus, LayerStatus, VhostUserDefinition, WhenFull,
};

use super::{
    AddOptions, LayerArguments, ListOptions, RemoveOptions, RetryOptions, absolute,
    info::disk_sheet,
};
use crate::{
    failure::{CommandResult, Failure},
    output::{
        self,
        style::{self, Style},
        table::{Table, TableColumn},
    },
};

pub(super) fn add(options: &AddOptions) -> CommandResult {
    let has_store = options.image.is_some() || options.store.is_some() || options.nbd.is_some();
    if !has_store && options.memory.is_none() && options.null.is_none() {
        return Err(Failure::usage("a disk needs a back end").advise(
            "name one of --image PATH, --store POOL --volume NAME, --nbd URI, --memory SIZE and \
             --null SIZE",
        ));
    }
    let definition = DiskDefinition {
        name: options.name.clone(),
        vm: options.vm.clone(),
        serial: options.serial.clone(),
        image: options.image.as_deref().map(absolute),
        format: options.image_format,
        backing_folders: options.backing_folders.iter().map(|it| absolute(it)).collect(),
        key: options.key.clone(),
        store: options.store.as_deref().map(absolute),
        volume: options.volume.clone(),
        nbd: options.nbd.clone(),
        timeout: options.timeout,
        memory: options.memory,
        null: options.null,
        direct: options.direct,
        read_only: options.read_only,
        when_full: if options.wait_when_full { WhenFull::Wait } else { WhenFull::Fail },
        block_size: options.block_size,
        tap: !options.no_tap,
        classify: !options.no_classify,
        layers: options.layers.clone(),
        vhost_user: options.socket.as_deref().map(|socket| VhostUserDefinition {
            socket: absolute(socket),
            queues: options.queues.unwrap_or(VhostUserDefinition::default().queues),
            threads: options.threads,
            spin: options.spin,
            group: options.group.clone(),
        }),
        ..DiskDefinition::default()
    };
    let client = options.control.client();
    let status = if options.temporary {
        client.add_disk_for_now(&definition)?
    } else {
        client.add_disk(&definition)?
    };
    if options.format.json {
        return output::json(&status);
    }
    output::text_line(&disk_sheet(&status).render(output::width(), Style::stdout()))
}

/// Shows the layers of a disk, after the change if there is one.
pub(super) fn layer(options: &LayerArguments) -> CommandResult {
    let client = options.control.client();
    let status = match &options.layer {
        None => client.disk(&options.name)?,
        Some(layer) => {
            let change = if options.remove {
                if !layer.options.is_empty() {
                    return Err(Failure::usage("--remove takes a kind without options"));
                }
                DiskChange {
                    remove_layer: Some(layer.kind.clone()),
                    temporary: options.temporary,
                    ..DiskChange::default()
                }
            } else {
                DiskChange {
                    set_layer: Some(layer.clone()),
                    above: options.above.clone(),
                    below: options.below.clone(),
                    temporary: options.temporary,
                    ..DiskChange::default()
                }
            };
            client.change_disk(&options.name, &change)?
        }
    };
    if options.format.json {
        return output::json(&status.layers);
    }
    let mut table =
        Table::new([TableColumn::text("LAYER"), TableColumn::text("OPTIONS").flexible()]);
    for layer in &status.layers {
        table.row([layer.name.clone(), layer_options(layer)]);
    }
    output::text_line(&table.render(output::width(), Style::stdout()))
}

/// The options of a layer in words.
fn layer_options(layer: &LayerStatus) -> String {
    let options = layer.definition.options.iter();
    options.map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(", ")
}

pub(super) fn remove(options: &RemoveOptions) -> CommandResult {
    let client = options.control.client();
    let remove_with = |force| {
        if options.temporary {
            client.remove_disk_for_now(&options.name, force)
        } else {
            client.remove_disk(&options.name, force)
        }
    };
    let done = match remove_with(options.force) {
        Err(ClientError::Refused(refused))
            if refused.code == ErrorCode::Conflict
                && !options.force
                && agreed(&refused.message) =>
        {
            remove_with(true)?
        }
        done => done?,
    };
    if options.format.json {
        return output::json(&done);
    }
    let message = if done.message.is_empty() {
        format!("{} is no longer served", options.name)
    } else {
        done.message
    };
    output::text_line(&message)
}

/// Asks on the terminal, if there is one, whether to remove a disk that is in use.
fn agreed(reason: &str) -> bool {
    let mut answer = String::new();
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return false;
    }
    let question = "after the removal its requests fail or hang. Remove it anyway? [y/N] ";
    output::screen::print_note(&format!("{reason}: {question}"));
    let read = io::stdin().lock().read_line(&mut answer);
    read.is_ok() && matches!(answer.trim(), "y" | "Y" | "yes")
}

pub(super) fn list(options: &ListOptions) -> CommandResult {
    let client = options.control.client();
    let list = client.disks()?;
    if options.format.json {
        return output::json(&list);
    }
    let style = Style::stdout();
    if list.disks.is_empty() && list.unserved.is_empty() {
        output::text_line("The daemon serves no disk. `fathom disk add` adds one.")?;
    } else {
        output::text_line(&table(&list).render(output::width(), style))?;
    }
    for disk in list.unserved.iter().filter(|disk| !disk.message.is_empty()) {
        let mark = style.paint(style::BAD, "!");
        output::text_line(&format!("{mark} {}: not-served: {}", disk.name, disk.message))?;
        if !disk.remedy.is_empty() {
            output::text_line(&format!("  → {}", disk.remedy))?;
        }
    }
    Ok(())
}

pub(super) fn retry(options: &RetryOptions) -> CommandResult {
    let status = options.control.client().retry_disk(&options.name)?;
    if options.format.json {
        return output::json(&status);
    }
    output::text_line(&disk_sheet(&status).render(output::width(), Style::stdout()))
}

fn table(list: &DiskList) -> Table {
    let mut table = Table::new([
        TableColumn::text("NAME").flexible(),
        TableColumn::text("VM").flexible().importance(3),
        TableColumn::number("SIZE"),
        TableColumn::text("STATE"),
        TableColumn::text("BACK END").flexible().importance(5),
        TableColumn::text("SOCKET").flexible().importance(4),
        TableColumn::text("LAYERS").importance(1),
    ]);
    for disk in &list.disks {
        let layers: Vec<&str> = disk.layers.iter().map(|layer| layer.name.as_str()).collect();
        let backend = disk.backend.place().unwrap_or_else(|| disk.backend.name.clone());
        let socket = disk.frontends.iter().find_map(|frontend| match frontend {
            FrontendStatus::VhostUser(status) => Some(status.socket.clone()),
            FrontendStatus::Nbd(_) => None,
        });
        table.row([
            disk.name.clone(),
            disk.vm.clone(),
            Bytes(disk.capacity_bytes).to_string(),
            state(disk),
            backend,
            socket.unwrap_or_default(),
            layers.join(" "),
        ]);
    }
    for disk in &list.unserved {
        table.row([
            disk.name.clone(),
            disk.vm.clone(),
            String::new(),
            disk.state().to_owned(),
            disk.image.clone().unwrap_or_default(),
            String::new(),
            String::new(),
        ]);
    }
    table
}

/// The users of a disk, in a word or two.
fn state(disk: &DiskStatus) -> String {
    if !disk.problems.is_empty() {
        return "problem".into();
    }
    let mut users = Vec::new();
    for frontend in &disk.frontends {
        match frontend {
            FrontendStatus::VhostUser(status) if status.connected => users.push("guest".to_owned()),
            FrontendStatus::Nbd(status) if status.connections > 0 => {
                users.push(format!("{} NBD", status.connections));
            }
            _ => {}
        }
    }
    if users.is_empty() { "idle".into() } else { users.join(", ") }
}
