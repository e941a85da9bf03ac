select coalesce(t.team, 'nobody') as team, count(*) as late, min(t.due) as since
from ticket t
where t.breached = true and t.status not in ('solved', 'closed')
group by coalesce(t.team, 'nobody')
order by 1
