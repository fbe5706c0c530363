//! Writing a packed container: restartable, atomic, equal bytes from equal plans.
//!
//! Everything grows in `NAME.partial` beside the destination and is renamed when complete. A
//! journal says which parts are complete; a run that finds one reads those parts again, compares
//! them with their digests and continues after the last good one.

use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::bytes::{Buffers, DataFile, WINDOW};
use crate::digest::Digest;
use crate::error::WeightsError;
use crate::journal::{Completed, Journal, is_of_plan};
use crate::manifest::{
    DIGESTS, EXPERTS, JOURNAL, MANIFEST, MANIFEST_DIGEST, Manifest, RESERVED, TRUNK,
};
use crate::outfile::{OutFile, sync_folder, write_file};
use crate::packed::{ExpertLayer, PARTIAL, partial_path};
use crate::plan::{PackPlan, PlannedTensor};
use crate::scan::{Scanner, Stream};

/// Bytes written between two waits for the disk: bounds the memory that dirty pages take and the
/// work that a power cut costs.
const SYNC_BYTES: u64 = 256 << 20;

/// A container being written.
///
/// 1. The trunk file ends after the last complete tensor, the experts file after the last
///    complete record and its padding, or a write that failed lies behind that.
/// 2. A part is in the journal only after all its bytes were written.
/// 3. The manifest is written after everything else is on the disk.
#[derive(Debug)]
pub struct Packer {
    destination: PathBuf,
    partial: PathBuf,
    manifest: Manifest,
    sidecars: Vec<(String, Vec<u8>)>,
    journal: Journal,
    trunk: OutFile,
    experts: OutFile,
    trunk_stream: Stream,
    tensors_done: usize,
    records: Vec<[u8; 32]>,
    /// Index of the next record's layer in the manifest, and the expert.
    next: (usize, u32),
    unsynced: u64,
    bytes_done: u64,
    bytes_total: u64,
}

impl Packer {
    /// Starts a pack at `destination`, or continues one with the same plan.
    ///
    /// # Errors
    ///
    /// [`WeightsError::DestinationExists`], [`WeightsError::OtherPlan`],
    /// [`WeightsError::Locked`], [`WeightsError::NotAPartial`], [`WeightsError::Plan`],
    /// [`WeightsError::DiskFull`], [`WeightsError::Io`].
    pub fn create_or_resume(destination: &Path, plan: PackPlan) -> Result<Self, WeightsError> {
        Self::create_or_resume_with(destination, plan, &mut |_, _| {})
    }

    /// [`Packer::create_or_resume`] that shows how far the check of complete parts is.
    ///
    /// **Units.** `progress(done, total)` counts bytes.
    ///
    /// # Errors
    ///
    /// As [`Packer::create_or_resume`].
    pub fn create_or_resume_with(
        destination: &Path,
        plan: PackPlan,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, WeightsError> {
        let manifest = plan.manifest()?;
        let partial = checked_destination(destination, manifest.plan)?;
        match std::fs::create_dir(&partial) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            result => result.map_err(WeightsError::io(&partial, "create"))?,
        }
        let (journal, completed) = open_journal(destination, &partial, &manifest)?;
        sync_folder(&partial)?;
        for stale in [MANIFEST, MANIFEST_DIGEST] {
            remove_if_there(&partial.join(stale))?;
        }
        let records = manifest.layers.iter().map(|l| l.record_bytes * u64::from(l.n_experts));
        let bytes_total =
            manifest.tensors.iter().map(|t| t.len).sum::<u64>() + records.sum::<u64>();
        let mut packer = Self {
            destination: destination.to_owned(),
            trunk: OutFile::open(partial.join(TRUNK))?,
            experts: OutFile::open(partial.join(EXPERTS))?,
            partial,
            manifest,
            sidecars: plan.sidecars,
            journal,
            trunk_stream: Stream::default(),
            tensors_done: 0,
            records: Vec::new(),
            next: (0, 0),
            unsynced: 0,
            bytes_done: 0,
            bytes_total,
        };
        packer.recheck(&completed, progress)?;
        Ok(packer)
    }

    /// Keeps the complete parts that are still good and cuts off everything behind them.
    fn recheck(
        &mut self,
        completed: &Completed,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), WeightsError> {
        let sizes = self.manifest.tensors.iter().take(completed.tensors.len()).map(|t| t.len);
        let total = sizes.sum::<u64>() + self.first_records_bytes(completed.records.len());
        let buffers = Buffers::default();
        self.recheck_tensors(completed, &buffers, &mut |done| progress(done, total))?;
        self.recheck_records(completed, &buffers, &mut |done| progress(done, total))?;
        let (tensors, records) = (self.tensors_done, self.records.len());
        if tensors < completed.tensors.len() || records < completed.records.len() {
            self.journal.restart(&Completed {
                tensors: completed.tensors[..tensors].to_vec(),
                records: completed.records[..records].to_vec(),
            })?;
        }
        let end = self.tensors_done.checked_sub(1).map_or(0, |last| {
            let tensor = &self.manifest.tensors[last];
            tensor.offset + tensor.len
        });
        self.trunk.set_len(end)?;
        self.experts.set_len(self.next_record_offset())
    }

    fn recheck_tensors(
        &mut self,
        completed: &Completed,
        buffers: &Buffers,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), WeightsError> {
        let Some(file) = DataFile::open(self.trunk.path.clone())? else { return Ok(()) };
        let mut scanner = Scanner::new(&file, buffers);
        let mut end = 0;
        for (tensor, wanted) in self.manifest.tensors.iter_mut().zip(&completed.tensors) {
            let mut stream = self.trunk_stream.clone();
            stream.pad_to(tensor.offset);
            let range = tensor.offset..tensor.offset + tensor.len;
            let gap = scanner.first_nonzero(end..tensor.offset);
            let got = scanner.digest(range.clone(), |bytes| stream.update(bytes));
            if unless_short(gap)? != Some(None) || unless_short(got)? != Some(*wanted) {
                return Ok(());
            }
            tensor.blake3 = *wanted;
            self.trunk_stream = stream;
            self.tensors_done += 1;
            self.bytes_done += tensor.len;
            end = range.end;
            progress(self.bytes_done);
        }
        Ok(())
    }

    fn recheck_records(
        &mut self,
        completed: &Completed,
        buffers: &Buffers,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), WeightsError> {
        let Some(file) = DataFile::open(self.experts.path.clone())? else { return Ok(()) };
        let mut scanner = Scanner::new(&file, buffers);
        for wanted in &completed.records {
            let Some((layer, expert)) = self.next_layer() else { break };
            let start = layer.record_offset(expert);
            let end = start + layer.record_bytes;
            let got = scanner.digest(start..end, |_| {});
            let padding = scanner.first_nonzero(end..start + layer.stride);
            if unless_short(got)? != Some(*wanted) || unless_short(padding)? != Some(None) {
                return Ok(());
            }
            self.bytes_done += layer.record_bytes;
            self.advance(*wanted);
            progress(self.bytes_done);
        }
        Ok(())
    }

    fn first_records_bytes(&self, count: usize) -> u64 {
        let mut left = count as u64;
        let mut bytes = 0;
        for layer in &self.manifest.layers {
            let here = left.min(u64::from(layer.n_experts));
            bytes += here * layer.record_bytes;
            left -= here;
        }
        bytes
    }

    fn next_layer(&self) -> Option<(&ExpertLayer, u32)> {
        self.manifest.layers.get(self.next.0).map(|layer| (layer, self.next.1))
    }

    fn next_record_offset(&self) -> u64 {
        self.next_layer().map_or(self.manifest.experts.len, |(l, expert)| l.record_offset(expert))
    }

    fn advance(&mut self, digest: Digest) {
        self.records.push(digest.0);
        let (layer, expert) = self.next;
        let last = expert + 1 == self.manifest.layers[layer].n_experts;
        self.next = if last { (layer + 1, 0) } else { (layer, expert + 1) };
    }

    /// Expert layers with all offsets: what a record must look like.
    pub fn expert_layers(&self) -> &[ExpertLayer] {
        &self.manifest.layers
    }

    /// The folder in which the container grows.
    pub fn partial(&self) -> &Path {
        &self.partial
    }

    /// Bytes of weights that are complete.
    pub fn bytes_done(&self) -> u64 {
        self.bytes_done
    }

    /// Bytes of weights that the container will have.
    pub fn bytes_total(&self) -> u64 {
        self.bytes_total
    }

    /// The tensor of the trunk to write next; nothing when all are complete.
    pub fn next_tensor(&self) -> Option<PlannedTensor> {
        self.manifest.tensors.get(self.tensors_done).map(|t| PlannedTensor {
            name: t.name.clone(),
            shape: t.shape.clone(),
            encoding: t.encoding,
        })
    }

    /// Layer and expert of the record to write next; nothing when all are complete.
    pub fn next_record(&self) -> Option<(u32, u32)> {
        self.next_layer().map(|(layer, expert)| (layer.layer, expert))
    }

    /// Writes the next tensor of the trunk. `fill` is asked for encoded rows, some at a time and
    /// in order, with the range of rows and room for exactly these.
    ///
    /// After an error the tensor is still the next one.
    ///
    /// # Errors
    ///
    /// What `fill` returns, [`WeightsError::DiskFull`], [`WeightsError::Io`].
    ///
    /// # Panics
    ///
    /// If `name` is not the next tensor.
    pub fn write_tensor<E, F>(&mut self, name: &str, mut fill: F) -> Result<(), E>
    where
        E: From<WeightsError>,
        F: FnMut(Range<usize>, &mut [u8]) -> Result<(), E>,
    {
        let next = self.manifest.tensors.get(self.tensors_done);
        let tensor = next.filter(|t| t.name == name).unwrap_or_else(|| {
            panic!("`{name}` is not the next tensor, {:?} is", next.map(|t| &t.name))
        });
        let info = tensor.info();
        let row_bytes = tensor.encoding.row_bytes(info.d_in());
        let rows_at_once = (WINDOW / row_bytes).max(1).min(info.rows());
        let mut buffer = vec![0; rows_at_once * row_bytes];
        let mut hasher = blake3::Hasher::new();
        let mut stream = self.trunk_stream.clone();
        stream.pad_to(tensor.offset);
        let mut row = 0;
        while row < info.rows() {
            let rows = row..(row + rows_at_once).min(info.rows());
            let bytes = &mut buffer[..rows.len() * row_bytes];
            fill(rows.clone(), bytes)?;
            hasher.update(bytes);
            stream.update(bytes);
            self.trunk.write(tensor.offset + (row * row_bytes) as u64, bytes)?;
            row = rows.end;
        }
        self.journal.append_tensor(self.tensors_done, Digest::finished(&hasher))?;
        self.manifest.tensors[self.tensors_done].blake3 = Digest::finished(&hasher);
        self.trunk_stream = stream;
        self.tensors_done += 1;
        Ok(self.wrote(info.len)?)
    }

    /// Writes the next record.
    ///
    /// After an error the record is still the next one.
    ///
    /// # Errors
    ///
    /// [`WeightsError::DiskFull`], [`WeightsError::Io`].
    ///
    /// # Panics
    ///
    /// If this is not the next record or has another length than planned.
    pub fn write_record(
        &mut self,
        layer: u32,
        expert: u32,
        bytes: &[u8],
    ) -> Result<(), WeightsError> {
        let next = self.next_record();
        assert!(next == Some((layer, expert)), "({layer}, {expert}) is not next, {next:?} is");
        let (planned, _) = self.next_layer().expect("there is a next record");
        let (wanted, got) = (planned.record_bytes, bytes.len() as u64);
        assert!(wanted == got, "a record of layer {layer} has {wanted} bytes, got {got}");
        let start = planned.record_offset(expert);
        let end = start + planned.stride;
        let digest = Digest::of(bytes);
        self.experts.write(start, bytes)?;
        self.experts.set_len(end)?;
        self.journal.append_record(self.records.len(), digest)?;
        self.advance(digest);
        self.wrote(got)
    }

    fn wrote(&mut self, bytes: u64) -> Result<(), WeightsError> {
        self.bytes_done += bytes;
        self.unsynced += bytes;
        if self.unsynced >= SYNC_BYTES {
            self.trunk.sync()?;
            self.experts.sync()?;
            self.journal.sync()?;
            self.unsynced = 0;
        }
        Ok(())
    }

    /// Completes the container and gives it its name.
    ///
    /// # Errors
    ///
    /// [`WeightsError::Incomplete`] when parts are missing, [`WeightsError::DestinationExists`],
    /// [`WeightsError::DiskFull`], [`WeightsError::Io`]. The pack can be continued after each.
    pub fn finish(mut self) -> Result<(), WeightsError> {
        let next_tensor = self.next_tensor().map(|t| format!("tensor `{}`", t.name));
        let next_record =
            self.next_record().map(|(l, expert)| format!("expert `{expert}` of layer `{l}`"));
        if let Some(next) = next_tensor.or(next_record) {
            return Err(WeightsError::Incomplete { path: self.partial, next });
        }
        let digests = self.records.as_flattened();
        self.manifest.digests.blake3 = Digest::of(digests);
        self.manifest.trunk.blake3 = self.trunk_stream.digest();
        self.trunk.sync()?;
        self.experts.sync()?;
        write_file(self.partial.join(DIGESTS), digests)?;
        for (name, bytes) in &self.sidecars {
            write_file(self.partial.join(name), bytes)?;
        }
        sync_folder(&self.partial)?;
        let text = self.manifest.text();
        write_file(
            self.partial.join(MANIFEST_DIGEST),
            format!("{}\n", Digest::of(&text)).as_bytes(),
        )?;
        write_file(self.partial.join(MANIFEST), &text)?;
        sync_folder(&self.partial)?;
        self.publish()
    }

    /// Renames the folder; the journal goes last, so that the lock holds until the end.
    fn publish(self) -> Result<(), WeightsError> {
        checked_destination(&self.destination, self.manifest.plan)?;
        match std::fs::remove_dir(&self.destination) {
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            result => result.map_err(WeightsError::io(&self.destination, "replace"))?,
        }
        let Self { destination, partial, journal, trunk, experts, .. } = self;
        // Windows renames no folder with open files.
        drop((trunk, experts));
        let held = cfg!(unix).then_some(journal);
        std::fs::rename(&partial, &destination).map_err(WeightsError::io(&partial, "rename"))?;
        remove_if_there(&destination.join(JOURNAL))?;
        drop(held);
        sync_folder(&destination)?;
        match destination.parent() {
            Some(parent) if parent != Path::new("") => sync_folder(parent),
            _ => sync_folder(Path::new(".")),
        }
    }
}

/// Nothing when the range is not all there, which is how a cut file shows.
fn unless_short<T>(result: Result<T, WeightsError>) -> Result<Option<T>, WeightsError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(WeightsError::ShortRead { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Locks the journal and reads what is complete, touching nothing that is not ours.
fn open_journal(
    destination: &Path,
    partial: &Path,
    manifest: &Manifest,
) -> Result<(Journal, Completed), WeightsError> {
    let before = folder_names(partial)?;
    // The journal is the first file of a partial folder.
    if let Some(found) = before.first().filter(|_| !before.iter().any(|name| name == JOURNAL)) {
        let found = found.clone();
        return Err(WeightsError::NotAPartial { path: partial.to_owned(), found });
    }
    let locked = Journal::lock(partial, JOURNAL, manifest.plan);
    // Another process may have finished between the first look and the lock.
    if let Err(error) = checked_destination(destination, manifest.plan) {
        if let Ok(journal) = locked
            && before.is_empty()
        {
            remove_if_there(journal.path())?;
            std::fs::remove_dir(partial).map_err(WeightsError::io(partial, "remove"))?;
        }
        return Err(error);
    }
    let mut journal = locked?;
    let parts = manifest.tensors.len() as u64 + manifest.experts.records;
    let loaded = journal.load(parts)?;
    let ours = |name: &String| {
        RESERVED.contains(&name.as_str()) || manifest.sidecars.iter().any(|s| s.name == *name)
    };
    if let Some(found) = folder_names(partial)?.into_iter().find(|name| !ours(name)) {
        return Err(WeightsError::NotAPartial { path: partial.to_owned(), found });
    }
    if let Some(completed) = loaded {
        journal.trim()?;
        return Ok((journal, completed));
    }
    journal.restart(&Completed::default())?;
    Ok((journal, Completed::default()))
}

fn folder_names(folder: &Path) -> Result<Vec<String>, WeightsError> {
    let list = std::fs::read_dir(folder).map_err(WeightsError::io(folder, "list"))?;
    let mut names = Vec::new();
    for entry in list {
        let entry = entry.map_err(WeightsError::io(folder, "list"))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    Ok(names)
}

/// The partial folder of a destination that is free: absent or an empty folder.
fn checked_destination(destination: &Path, plan: Digest) -> Result<PathBuf, WeightsError> {
    let exists = || WeightsError::DestinationExists { path: destination.to_owned() };
    let name = destination.file_name().map(|name| name.to_string_lossy().into_owned());
    let partial = match (name, partial_path(destination)) {
        (Some(name), Some(partial)) if !name.ends_with(PARTIAL) => partial,
        _ => {
            return Err(WeightsError::Plan {
                subject: destination.display().to_string(),
                field: "the destination",
                wanted: format!("the name of a folder that does not end in `{PARTIAL}`"),
                got: destination.display().to_string(),
            });
        }
    };
    match std::fs::read_dir(destination) {
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        Err(e) if e.kind() == ErrorKind::NotADirectory => return Err(exists()),
        Err(e) => return Err(WeightsError::io(destination, "list")(e)),
        Ok(mut entries) => {
            if entries.next().is_some() {
                // A run killed right after the rename left its journal in a complete container.
                let left = destination.join(JOURNAL);
                if destination.join(MANIFEST).is_file() && is_of_plan(&left, plan) {
                    remove_if_there(&left)?;
                }
                return Err(exists());
            }
        }
    }
    Ok(partial)
}

fn remove_if_there(path: &Path) -> Result<(), WeightsError> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        result => result.map_err(WeightsError::io(path, "remove")),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::encoding::Encoding;
    use crate::plan::{PlannedLayer, PlannedPiece};

    fn plan() -> PackPlan {
        let piece = PlannedPiece { role: "up".into(), encoding: Encoding::F32, d_out: 2, d_in: 4 };
        PackPlan {
            family: "tiny".into(),
            config: json!({}),
            trunk: vec![PlannedTensor {
                name: "w".into(),
                shape: vec![4],
                encoding: Encoding::F32,
            }],
            layers: vec![PlannedLayer { layer: 0, n_experts: 2, pieces: vec![piece] }],
            sidecars: Vec::new(),
            provenance: json!({}),
            kept: Vec::new(),
        }
    }

    fn write_w(packer: &mut Packer) -> Result<(), WeightsError> {
        packer.write_tensor("w", |_, out| {
            out.fill(7);
            Ok(())
        })
    }

    /// Whatever file the disk has no room for: a clear error, and the part is next again.
    #[test]
    fn a_full_disk_leaves_the_pack_restartable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m");
        let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut packer = Packer::create_or_resume(&path, plan()).unwrap();
        let expect = |result: Result<(), WeightsError>, name: &str, bytes: &str| {
            let error = result.unwrap_err();
            assert!(matches!(error, WeightsError::DiskFull { .. }), "{error:?}");
            let message = error.to_string();
            for part in [name, bytes, "run the same command again"] {
                assert!(message.contains(part), "{message}");
            }
        };
        let trunk = std::mem::replace(&mut packer.trunk.file, full());
        expect(write_w(&mut packer), "trunk.bin`", "`16` bytes");
        packer.trunk.file = trunk;
        let experts = std::mem::replace(&mut packer.experts.file, full());
        expect(packer.write_record(0, 0, &[1; 32]), "experts.bin`", "`32` bytes");
        packer.experts.file = experts;
        packer.write_record(0, 0, &[1; 32]).unwrap();
        let journal = packer.journal.swap_file(full());
        expect(packer.write_record(0, 1, &[2; 32]), "journal`", "`48` bytes");
        drop(packer.journal.swap_file(journal));
        assert_eq!((packer.next_tensor().unwrap().name.as_str(), packer.bytes_done()), ("w", 32));
        drop(packer);

        let mut packer = Packer::create_or_resume(&path, plan()).unwrap();
        assert_eq!(packer.next_record(), Some((0, 1)));
        write_w(&mut packer).unwrap();
        packer.write_record(0, 1, &[2; 32]).unwrap();
        packer.finish().unwrap();
        let checkpoint = crate::Checkpoint::open(&path).unwrap();
        assert_eq!(crate::verify(&checkpoint, &mut |_, _| {}).unwrap().damage.count, 0);
    }
}
