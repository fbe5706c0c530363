//! Reading every byte of a checkpoint again and comparing it with its digests.

use std::path::Path;

use crate::bytes::{Buffers, DataFile, Folder};
use crate::checkpoint::{Checkpoint, CheckpointKind};
use crate::error::WeightsError;
use crate::manifest::{self, JOURNAL, MANIFEST, Manifest, RESERVED, Section, damaged};
use crate::packed::{ExpertLayer, Packed};
use crate::scan::{Scanner, Stream};

/// Damaged parts that a report describes; all are counted.
const DESCRIBED: usize = 20;

/// What a verification looked at and found.
#[derive(Debug)]
pub struct VerifyReport {
    /// Kind of the checkpoint.
    pub kind: CheckpointKind,
    /// Whether only headers and byte ranges were checked: safetensors folders carry no digests.
    pub headers_only: bool,
    /// Bytes that were to be read and compared with digests.
    pub bytes: u64,
    /// Tensors checked.
    pub tensors: u64,
    /// Expert records checked.
    pub records: u64,
    /// Names in the folder that do not belong to the container.
    pub unlisted: Vec<String>,
    /// What is damaged: [`WeightsError::Digest`] or [`WeightsError::Padding`] with file, tensor or
    /// expert and byte range, or why a part could not be read.
    pub damage: Damage,
}

/// Damaged parts.
#[derive(Debug, Default)]
pub struct Damage {
    /// How many there are.
    pub count: u64,
    /// The first of them.
    pub first: Vec<WeightsError>,
}

impl Damage {
    fn note(&mut self, result: Result<(), WeightsError>) {
        let Err(error) = result else { return };
        self.count += 1;
        if self.first.len() < DESCRIBED {
            self.first.push(error);
        }
    }
}

/// Checks all of a packed checkpoint: every tensor, every record, all padding, the digests, the
/// sidecars and the manifest. Safetensors folders carry no digests, so of those only headers and
/// byte ranges are checked again, and the report says so.
///
/// **Units.** `progress(done, total)` counts bytes.
///
/// # Errors
///
/// Whatever [`Checkpoint::open`] reports: what makes it unreadable as a whole.
pub fn verify(
    checkpoint: &Checkpoint,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<VerifyReport, WeightsError> {
    match checkpoint.kind() {
        CheckpointKind::HuggingFace => {
            let tensors = checkpoint.reread_headers()?;
            progress(0, 0);
            Ok(VerifyReport {
                kind: CheckpointKind::HuggingFace,
                headers_only: true,
                bytes: 0,
                tensors,
                records: 0,
                unlisted: Vec::new(),
                damage: Damage::default(),
            })
        }
        CheckpointKind::Packed => verify_packed(checkpoint.folder(), progress),
    }
}

fn verify_packed(
    folder: &Folder,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<VerifyReport, WeightsError> {
    let buffers = Buffers::default();
    // Opens anew: checks the manifest, all lengths and the list of digests.
    let opened = manifest::open(folder, &buffers)?;
    let manifest = &*opened.packed.manifest;
    let small = manifest.digests.len + manifest.sidecars.iter().map(|s| s.len).sum::<u64>();
    let total = manifest.trunk.len + manifest.experts.len + small;
    let mut done = 0;
    let mut tick = |bytes: u64| {
        done += bytes;
        progress(done, total);
    };
    let mut damage = Damage::default();
    tick(manifest.digests.len);
    for sidecar in &manifest.sidecars {
        damage.note(verify_sidecar(folder, sidecar, &buffers));
        tick(sidecar.len);
    }
    verify_trunk(manifest, &opened.files[0], &buffers, &mut damage, &mut tick);
    verify_experts(&opened.packed, &opened.files[1], &buffers, &mut damage, &mut tick);
    let known = |name: &String| {
        name != JOURNAL && RESERVED.contains(&name.as_str())
            || manifest.sidecars.iter().any(|s| s.name == *name)
    };
    let manifest_bytes = folder.require(MANIFEST)?.len;
    Ok(VerifyReport {
        kind: CheckpointKind::Packed,
        headers_only: false,
        bytes: total + manifest_bytes,
        tensors: manifest.tensors.len() as u64,
        records: manifest.experts.records,
        unlisted: folder.names()?.into_iter().filter(|name| !known(name)).collect(),
        damage,
    })
}

fn verify_sidecar(
    folder: &Folder,
    sidecar: &Section,
    buffers: &Buffers,
) -> Result<(), WeightsError> {
    let file = folder.require(&sidecar.name)?;
    let got = Scanner::new(&file, buffers).digest(0..file.len, |_| {})?;
    if got == sidecar.blake3 {
        return Ok(());
    }
    let whole = (file.path.as_path(), 0..file.len);
    Err(damaged(whole, format!("`{}`", sidecar.name), sidecar.blake3, got))
}

fn verify_trunk(
    manifest: &Manifest,
    file: &DataFile,
    buffers: &Buffers,
    damage: &mut Damage,
    tick: &mut impl FnMut(u64),
) {
    let mut scanner = Scanner::new(file, buffers);
    let mut stream = Stream::default();
    let mut end = 0;
    let mut before = "the start".to_owned();
    let damaged_before = damage.count;
    for tensor in &manifest.tensors {
        damage.note(expect_zeros(&mut scanner, end..tensor.offset, || before));
        stream.pad_to(tensor.offset);
        damage.note(tensor.check(&mut scanner, |bytes| stream.update(bytes)));
        before = format!("tensor `{}`", tensor.name);
        tick(tensor.offset + tensor.len - end);
        end = tensor.offset + tensor.len;
    }
    let got = stream.digest();
    // With all tensors as they should be, it is this digest that is wrong.
    if damage.count == damaged_before && got != manifest.trunk.blake3 {
        let whole = (file.path.as_path(), 0..file.len);
        let subject = "the trunk as a whole".to_owned();
        damage.note(Err(damaged(whole, subject, manifest.trunk.blake3, got)));
    }
}

fn verify_experts(
    packed: &Packed,
    file: &DataFile,
    buffers: &Buffers,
    damage: &mut Damage,
    tick: &mut impl FnMut(u64),
) {
    let mut scanner = Scanner::new(file, buffers);
    let mut digests = packed.digests.iter();
    for layer in packed.expert_layers() {
        for expert in 0..layer.n_experts {
            let wanted = digests.next().expect("open checked the number of digests");
            damage.note(verify_record(&mut scanner, layer, expert, *wanted));
            tick(layer.stride);
        }
    }
}

fn verify_record(
    scanner: &mut Scanner<'_>,
    layer: &ExpertLayer,
    expert: u32,
    wanted: [u8; 32],
) -> Result<(), WeightsError> {
    let start = layer.record_offset(expert);
    let end = start + layer.record_bytes;
    let subject = || format!("expert `{expert}` of layer `{}`", layer.layer);
    let got = scanner.digest(start..end, |_| {})?;
    if got.0 != wanted {
        let wanted = crate::digest::Digest(wanted);
        return Err(damaged((&scanner.file.path, start..end), subject(), wanted, got));
    }
    expect_zeros(scanner, end..start + layer.stride, subject)
}

fn expect_zeros(
    scanner: &mut Scanner<'_>,
    range: std::ops::Range<u64>,
    subject: impl FnOnce() -> String,
) -> Result<(), WeightsError> {
    let path: &Path = &scanner.file.path;
    match scanner.first_nonzero(range)? {
        None => Ok(()),
        Some((offset, got)) => {
            Err(WeightsError::Padding { path: path.to_owned(), subject: subject(), offset, got })
        }
    }
}
